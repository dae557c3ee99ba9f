"""The loops of a compiled step that the prediction skips on a pipeline stage."""

import re

import pytest

from predict.time.ticks import Ticks, is_idle, num_layers
from sharding.ops.update_if import AT_MOST_ONCE
from tests.runs import ROOT, make_run, write_corpus

T5 = (
    "data.name=text",
    "data.tokenizer=bytes",
    "data.sequence_length=16",
    "data.global_batch_size=16",
    "model.num_layers=2",
    "model.num_decoder_layers=3",
    "model.embed_dim=32",
    "mesh.pipeline=2",
    "train.num_microbatches=2",
)


@pytest.mark.thorough
def test_stages_of_a_compiled_t5_skip_layers_that_they_do_not_have(tmp_path):
    run, _ = make_run((*T5, *write_corpus(tmp_path)), config=str(ROOT / "configs" / "t5.py"))
    text = run.compile_train_step().as_text() or ""
    paths = re.findall(r' while\(.*op_name="([^"]*)"', text)
    ticks = Ticks.of_program(run.tick_program(), run.layouts)
    first, last = (frozenset().union(*stage) for stage in zip(*ticks.stages, strict=True))

    # The last stage computes its forwards as part of its backwards.
    backward = [path for path in paths if "/pipeline_B/" in path]
    # 2 encoder layers and 1 decoder layer, then 2 decoder layers: both stages have room for 2.
    loops = [path for path in backward if path.endswith("/layers/while")]
    for stack, counts in {"encoder": (2, 0), "decoder": (1, 2)}.items():
        own = [path for path in loops if f"/stack_{stack}/" in path]
        assert {(num_layers(p, first), num_layers(p, last)) for p in own} == {counts}
    once = [path for path in backward if path.endswith(f"/{AT_MOST_ONCE}/while")]
    before = [path for path in once if "/stack_decoder/before/" in path]
    assert before and all(is_idle(p, last) and not is_idle(p, first) for p in before)
    head = [path for path in once if "/pipeline_B.is_last/" in path]
    assert head and all(is_idle(p, first) and not is_idle(p, last) for p in head)
