"""Exports to ONNX compute the logits of transformers, for other batches than the traced one."""

import json
import logging
import sys
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from convert import from_hf, to_onnx
from tests.convert import cases


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["gpt2", "vit", "llama_llama3", "roberta_sequence", "swin"])
def test_logits_equal_those_of_transformers(name, tmp_path):
    model = cases.make(name)
    model.save_pretrained(tmp_path / "hf")
    difference = to_onnx.convert(tmp_path / "hf", tmp_path / "onnx")
    assert 0 < difference < 1e-5
    rng = np.random.default_rng(7)
    if cases.reads_images(name):
        size = model.config.image_size
        inputs = {"pixel_values": rng.normal(size=(5, 3, size, size)).astype(np.float32)}
    else:
        mask = np.ones((4, 17), np.int64)
        mask[2, 11:] = 0
        tokens = np.where(mask == 1, rng.integers(2, cases.VOCAB, mask.shape), cases.PAD)
        inputs = {"input_ids": tokens, "attention_mask": mask}
        if getattr(model.config, "type_vocab_size", 1) > 1:
            inputs["token_type_ids"] = rng.integers(0, 2, mask.shape)
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / to_onnx.MODEL_FILE)
    assert [each.name for each in session.get_inputs()] == [*inputs]
    (output,) = session.run(["logits"], inputs)
    found = np.asarray(output)
    with torch.no_grad():
        arguments = {key: torch.from_numpy(array) for key, array in inputs.items()}
        expected = model(**arguments).logits.numpy()
    if found.ndim == 3:
        found, expected = (x[inputs["attention_mask"] == 1] for x in (found, expected))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    config = json.loads((tmp_path / "onnx" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]


@pytest.mark.thorough
def test_a_run_is_exported_by_the_command(tmp_path):
    cases.make("gpt2").save_pretrained(tmp_path / "hf")
    from_hf.convert(tmp_path / "hf", tmp_path / "run")
    assert to_onnx.main([str(tmp_path / "run"), str(tmp_path / "onnx")]) == 0
    names = {file.name for file in (tmp_path / "onnx").iterdir()}
    assert {"model.onnx", "config.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)


def test_a_rope_that_depends_on_the_length_is_refused(tmp_path, capfd):
    cases.save("llama_dynamic", tmp_path / "hf")
    assert to_onnx.main([str(tmp_path / "hf"), str(tmp_path / "onnx")]) == 2
    error = capfd.readouterr().err
    assert "cannot export LlamaForCausalLM to ONNX with rope_type='dynamic', whose" in error
    assert error.count("\n") == 1 and not (tmp_path / "onnx").exists()


def test_a_failure_of_the_exporter_is_one_line(tmp_path, capfd, monkeypatch):
    def fail(*args, **kwargs):
        warnings.warn("deprecated", stacklevel=1)
        print("def forward(self):\n    ...")
        print("graph():\n    ...", file=sys.stderr)
        logging.getLogger("torch.fx").warning("cannot find the user's code\n")
        raise torch.onnx.OnnxExporterError("step 1/3\n" * 99) from RuntimeError("Eq(u0, 1)\nat a")

    monkeypatch.setattr(torch.onnx, "export", fail)
    cases.save("gpt2", tmp_path / "hf")
    assert to_onnx.main([str(tmp_path / "hf"), str(tmp_path / "onnx")]) == 2
    printed = capfd.readouterr()
    expected = "error: PyTorch cannot export GPT2LMHeadModel to ONNX: Eq(u0, 1) at a\n"
    assert (printed.out, printed.err) == ("", expected)


def test_models_that_cannot_be_exported_are_refused(tmp_path, capsys):
    cases.make("gpt2_base").save_pretrained(tmp_path / "base")
    assert to_onnx.main([str(tmp_path / "base"), str(tmp_path / "onnx")]) == 2
    assert "is a GPT2Model, but exports to ONNX know only models of" in capsys.readouterr().err
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert to_onnx.main([str(tmp_path / "adapter"), str(tmp_path / "onnx")]) == 2
    assert "is an adapter; merge it first" in capsys.readouterr().err
    assert not (tmp_path / "onnx").exists()


@pytest.mark.thorough
def test_a_file_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    cases.make("vit").save_pretrained(tmp_path / "hf")
    cases.make("vit").save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: 1.5 * tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    other = from_hf.load(tmp_path / "other")
    monkeypatch.setattr(to_onnx, "load_model", lambda source: other)
    with pytest.raises(ValueError, match="the logits of the ONNX file differ by"):
        to_onnx.convert(tmp_path / "hf", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
