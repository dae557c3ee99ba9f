"""Models and runs that are refused: with one sentence, and without files left behind."""

import dataclasses
import json
import struct
from typing import Any

import jax
import numpy as np
import pytest
import torch

from convert import from_hf, to_hf
from convert.from_hf import load
from convert.names import TensorMapping
from convert.source import read_source
from convert.tensor_files import open_tensors
from models.vision.vit import ViTConfig
from tests.convert import cases, hf_files


def drop(name):
    return lambda directory: hf_files.edit(directory, lambda t: t.pop(name))


def reshape(directory):
    name = "transformer.h.1.mlp.c_fc.weight"
    hf_files.edit(directory, lambda t: t.update({name: t[name].T.contiguous()}))


def add_layer(directory):
    hf_files.edit(directory, hf_files.add(transformer__h__3__ln_1__bias=torch.ones(39)))


def truncate(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncate_header(directory):
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 900) + b"{}")


def claim_huge_header(directory):
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 3 * 10**9))
        file.truncate(4 * 10**9)  # sparse: it takes no space on the disk


def garble_header(directory):
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")


def overlap(directory):
    header = {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(8)
    (directory / "model.safetensors").write_bytes(content)


def write_index(directory, weight_map):
    (directory / "model.safetensors").unlink()
    index = {"weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def remove_shard(directory):
    write_index(directory, {"transformer.wte.weight": "model-00001-of-00002.safetensors"})


def list_numbers(directory):
    write_index(directory, {"a": 1})


def leave_directory(directory):
    write_index(directory, {"transformer.wte.weight": "../x.safetensors"})


def pickle_weights(directory, *, is_zip=True):
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    torch.save(cases.make("gpt2").state_dict(), path, _use_new_zipfile_serialization=is_zip)


def quantise(directory):
    name = "transformer.ln_f.weight"
    hf_files.edit(directory, lambda t: t.update({name: t[name].to(torch.int8)}))


def untie(directory):
    hf_files.edit(
        directory, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1})
    )


REFUSED = {
    "missing": (
        drop("transformer.h.2.ln_1.bias"),
        r"lacks 1 tensor.*transformer\.h\.2\.ln_1\.bias",
    ),
    "extra": (
        lambda d: hf_files.edit(d, hf_files.add(transformer__h__3__x=torch.ones(1))),
        r"unknown 1.*h\.3\.x",
    ),
    "shape": (reshape, r"h\.1\.mlp\.c_fc\.weight .*\[50, 39\].*\[39, 50\]"),
    "truncated": (truncate, r"model\.safetensors is damaged: it has"),
    "truncated header": (truncate_header, r"damaged: it ends before"),
    "huge header": (claim_huge_header, r"has a header of 3,000,000,000 bytes, but at most 33,554,"),
    "garbled header": (garble_header, r"the header of .* damaged"),
    "overlap": (overlap, r"damaged: the offsets of b"),
    "no shard": (remove_shard, r"model-00001-of-00002\.safetensors is missing"),
    "no file name": (
        list_numbers,
        r"index\.json: weight_map is \{'a': 1\}, but must be of type dict\[str, str\]",
    ),
    "outside": (leave_directory, r"must be a name in"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"contains neither"),
    "no config": (lambda d: (d / "config.json").unlink(), r"neither a config\.json"),
    "config no JSON": (
        lambda d: (d / "config.json").write_text("{"),
        r"config\.json is not valid JSON",
    ),
    "pickle": (pickle_weights, r"is a pickle.*, if you trust it, add --allow_pickle_weights"),
    "quantised": (quantise, r"transformer\.ln_f\.weight.* has the dtype I8"),
    "untied": (untie, r"transformer\.wte\.weight and lm_head\.weight differ"),
    "architecture": (
        lambda d: hf_files.edit_config(d, architectures=["FalconForCausalLM"], model_type="falcon"),
        r"FalconForCausalLM.*is not supported.*GPT2LMHeadModel",
    ),
    "sizes": (lambda d: hf_files.edit_config(d, n_head=4), r"num_heads=4 must divide"),
}


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("vit", {"image_size": [20, 24]}, r"image_size=\[20, 24\], .* must be square"),
        (
            "vit",
            {"patch_size": "4"},
            r"config\.json gives model\.patch_size='4' must be of type int",
        ),
        (
            "swin",
            {"depths": 2},
            r"config\.json gives model\.depths=2 must be a list of values of type int",
        ),
        (
            "gpt2",
            {"n_layer": 2.0},
            r"config\.json gives model\.num_layers=2\.0 must be of type int",
        ),
    ],
)
def test_values_of_wrong_types_are_rejected(name, changes, message, tmp_path):
    cases.save(name, tmp_path)
    hf_files.edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_equal_height_and_width_are_read_as_one_size(tmp_path):
    cases.save("vit", tmp_path)
    expected = read_source(tmp_path).config
    size = expected.image_size
    patch = expected.patch_size
    hf_files.edit_config(tmp_path, image_size=[size, size], patch_size=[patch, patch])
    assert read_source(tmp_path).config == expected


@pytest.mark.parametrize("what", REFUSED)
def test_errors_are_reported_and_leave_no_files(what, tmp_path, capsys):
    spoil, expected = REFUSED[what]
    cases.save("gpt2", tmp_path / "theirs")
    spoil(tmp_path / "theirs")
    with pytest.raises(ValueError, match=expected):
        load(tmp_path / "theirs")
    assert from_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_pickles_are_read_if_allowed(is_zip, tmp_path):
    cases.save("gpt2", tmp_path / "plain")
    cases.save("gpt2", tmp_path / "theirs")
    pickle_weights(tmp_path / "theirs", is_zip=is_zip)
    found = hf_files.parameters(tmp_path / "theirs", allow_pickle_weights=True)
    jax.tree.map(np.testing.assert_array_equal, found, hf_files.parameters(tmp_path / "plain"))


@pytest.mark.parametrize(
    "content, reason",
    [
        ([torch.ones(2)], "other objects than tensors with names"),
        (None, "other objects than tensors with names"),
        (torch.ones(2), "other objects than tensors with names"),
        ({1: torch.ones(2)}, "other objects than tensors with names"),
        ({"x": torch.ones(2, 2).to_sparse()}, "the tensor x, which is torch.sparse_coo on cpu"),
        ({"x": torch.ones(2, device="meta")}, "the tensor x, which is torch.strided on meta"),
    ],
    ids=["list", "None", "tensor", "number", "sparse", "meta"],
)
def test_pickles_of_other_objects_are_refused(content, reason, tmp_path):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=reason):
        open_tensors(tmp_path, allow_pickle_weights=True)


def test_pickled_parameters_are_read(tmp_path):
    weight = torch.nn.Parameter(torch.arange(3.0))
    torch.save({"x": weight, "y": -weight.detach()}, tmp_path / "pytorch_model.bin")
    tensors = open_tensors(tmp_path, allow_pickle_weights=True)
    assert [t.map().tolist() for t in tensors.values()] == [[0, 1, 2], [0, -1, -2]]


class _Payload:
    def __reduce__(self):
        return (open, ("payload_ran", "w"))


def test_pickles_that_run_code_are_rejected_even_if_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases.save("gpt2", tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save({"x": _Payload()}, tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as a file of weights only"):
        load(tmp_path / "theirs", allow_pickle_weights=True)
    assert not (tmp_path / "payload_ran").exists()


def test_mesh_that_does_not_fit_is_rejected_before_writing(tmp_path, capsys):
    cases.save("gpt2", tmp_path / "theirs")
    args = [str(tmp_path / "theirs"), str(tmp_path / "ours"), "--config.mesh.model=2"]
    assert from_hf.main(args) == 2
    assert "mesh.model=2 must divide" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_existing_directories_are_not_overwritten(tmp_path, capsys):
    cases.save("gpt2", tmp_path / "theirs")
    before = sorted((tmp_path / "theirs").iterdir())
    assert from_hf.main([str(tmp_path / "theirs")] * 2) == 2
    assert "not empty" in capsys.readouterr().err
    assert sorted((tmp_path / "theirs").iterdir()) == before


@pytest.mark.parametrize("spoil", ["state", "config.yaml", "name", "none"])
def test_to_hf_rejects_anything_but_an_intact_run(spoil, tmp_path, capsys):
    cases.save("gpt2", tmp_path / "theirs")
    run = tmp_path / "ours"
    from_hf.convert(tmp_path / "theirs", run)
    if spoil == "state":
        file = max(run.glob("checkpoints/0/state/**/*"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif spoil == "config.yaml":
        (run / "config.yaml").unlink()
    elif spoil == "name":
        text = (run / "config.yaml").read_text().replace("name: gpt2", "name: gpt7")
        (run / "config.yaml").write_text(text)
    source = tmp_path / "theirs" if spoil == "none" else run
    assert to_hf.main([str(source), str(tmp_path / "back")]) == 2
    said = {
        "state": "damaged",
        "config.yaml": "config.yaml is missing",
        "name": "model.name='gpt7'",
        "none": "is already a Hugging Face model",
    }
    assert said[spoil] in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("dtypes.json", {"transformer.wte.weight": 5}, "dtypes.json is {'transformer.wte.weight'"),
        ("dtypes.json", {"transformer.wte.weight": ["F32"]}, "but must be of type dict[str, str]"),
        ("dtypes.json", {"transformer.wte.weight": "int4"}, "has the dtype 'int4' for transformer"),
        ("config.json", {"id2label": {"9" * 5000: "a"}}, "must be a number of at most 9 digits"),
    ],
)
def test_to_hf_rejects_wrong_values_in_the_files_of_the_original_model(
    file, content, message, tmp_path, capsys
):
    cases.save("gpt2", tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    path = tmp_path / "ours" / "hf" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    assert to_hf.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("dtype", [["x"], 5, "int4", {"a": 1}])
def test_to_hf_replaces_a_dtype_that_it_does_not_know(dtype, tmp_path):
    cases.save("gpt2", tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    path = tmp_path / "ours" / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": dtype}))
    assert to_hf.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("size", [0, -5])
def test_to_hf_rejects_files_of_no_size(size, tmp_path, capsys):
    arguments = [str(tmp_path / "run"), str(tmp_path / "back"), f"--max_shard_bytes={size}"]
    assert to_hf.main(arguments) == 2
    assert f"--max_shard_bytes={size} must be at least 1" in capsys.readouterr().err


def test_to_hf_rejects_values_that_overflow_the_dtype(tmp_path, capsys):
    cases.save("gpt2", tmp_path / "theirs")
    name = "transformer.ln_f.weight"
    hf_files.edit(tmp_path / "theirs", lambda t: t.update({name: t[name] + 1e6}))
    from_hf.convert(tmp_path / "theirs", tmp_path / "ours")
    args = [str(tmp_path / "ours"), str(tmp_path / "back"), "--dtype=float16"]
    assert to_hf.main(args) == 2
    assert f"{name} has values too large for float16" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_failed_conversion_leaves_no_files(tmp_path, monkeypatch, capsys):
    def fail(self, theirs, index):
        if "mlp" in self.ours:
            raise OSError("the disk is gone")
        return read(self, theirs, index)

    read = TensorMapping.read
    monkeypatch.setattr(TensorMapping, "read", fail)
    cases.save("gpt2", tmp_path / "theirs")
    assert from_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert line.endswith("could not be saved: the disk is gone")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_model_that_cannot_be_exported_is_known_before_training():
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "num_labels": 3}
    config = ViTConfig(**sizes, image_size=8, num_channels=1, patch_size=4, mlp_dim=8)
    assert to_hf.export_problem("vit", config, None) is None
    problem = to_hf.export_problem("vit", dataclasses.replace(config, pool="mean"), None)
    assert problem is not None and "cannot have model.pool='mean'" in problem
    assert to_hf.export_problem("resmlp", None, None) is None  # Hugging Face has no such model
