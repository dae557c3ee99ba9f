"""The guide "Add a model family": its example is a family that works."""

import re
from types import SimpleNamespace

import numpy as np
import torch

from convert import registry
from convert.families import llama
from convert.from_hf import load
from tests.convert import cases, comparison
from tests.runs import ROOT

GUIDE = (ROOT / "docs" / "add_model_family.md").read_text(encoding="utf-8")


def test_example_has_the_logits_of_transformers(tmp_path, monkeypatch):
    (table,) = re.findall(r"```python\n(_OLMO2 = .*?)```", GUIDE, re.DOTALL)
    lines = table.splitlines()
    assert f"in {len(lines)} lines" in GUIDE and len(lines) < 60
    names = {name: value for name, value in vars(llama).items() if name != "_OLMO2"}
    exec(table, names)
    family = SimpleNamespace(ARCHITECTURES=(names["_OLMO2"],))
    monkeypatch.setattr(registry, "_FAMILIES", (family,))
    model = load(cases.save("olmo2", tmp_path))
    found = np.asarray(comparison.our_outputs(model, "olmo2"))
    with torch.no_grad():
        expected = comparison.their_outputs(cases.make("olmo2"), "olmo2").numpy()
    counts = comparison.weights("olmo2") > 0
    # As in tests/convert/test_parity.py: float32 rounding, accumulated over the layers.
    np.testing.assert_allclose(found[counts], expected[counts], rtol=0, atol=1e-4)


def test_fields_in_the_guide_exist():
    rows = re.findall(r"^\| [^|`]+ \| (`.*`) \|$", GUIDE, re.MULTILINE)
    fields = {name.strip("`") for row in rows for name in row.split(", ")}
    assert len(fields) > 15 and fields <= {*llama.Llama.Config.__dataclass_fields__}
