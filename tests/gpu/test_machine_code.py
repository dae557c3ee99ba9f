"""Tests of steps that are compiled without machine code."""

import concurrent.futures
import dataclasses
import functools
import subprocess
from pathlib import Path

import pytest

from predict.machines import machine_code
from predict.machines.datasheets import machine_of
from predict.machines.machine_code import options_without_machine_code
from predict.program.flops import matmul_flops_in_text
from predict.time.prediction import predict
from tests.gpu import steps
from train.compile import run_for

pytestmark = pytest.mark.gpu_compiler

SIZES = ("model.num_layers=2", "data.sequence_length=64", "mesh.model=2", *steps.BFLOAT16)


def test_step_without_machine_code_is_the_same_program_with_the_same_memory():
    whole = steps.make_run("gpt2", SIZES, has_machine_code=True).compile_train_step()
    read_only = steps.make_run("gpt2", SIZES).compile_train_step()
    assert read_only.as_text() == whole.as_text()
    assert str(read_only.memory_analysis()) == str(whole.memory_analysis())


def test_step_without_triton_kernels_does_the_same_work():
    def compiled(*, has_triton_kernels: bool):
        described = steps.make_run("gpt2", SIZES)
        assert described.target is not None
        target = dataclasses.replace(described.target, has_triton_kernels=has_triton_kernels)
        text = steps.text_of(run_for(described.config, target))
        return text, predict(text, dict(described.mesh.shape), machine_of(target))

    text, predicted = compiled(has_triton_kernels=True)
    text_without, predicted_without = compiled(has_triton_kernels=False)
    assert "__triton" in text
    assert "__triton" not in text_without
    assert matmul_flops_in_text(text_without) == matmul_flops_in_text(text)
    assert predicted_without.matmul_s == pytest.approx(predicted.matmul_s, rel=0.05)
    assert 1 <= predicted_without.step_s / predicted.step_s < 1.2


def test_assembler_writes_an_empty_file_at_once(tmp_path):
    folder = options_without_machine_code()["xla_gpu_cuda_data_dir"]
    assembler = f"{folder}/bin/ptxas"
    out = tmp_path / "kernel.cubin"
    subprocess.run([assembler, tmp_path / "absent.ptx", "-o", out, "-arch", "sm_90a"], check=True)
    assert out.read_bytes() == b""
    version = subprocess.run([assembler, "--version"], check=True, capture_output=True, text=True)
    assert "Cuda compilation tools, release" in version.stdout  # as XLA asks for it


def test_threads_share_one_assembler(monkeypatch):
    fresh = functools.cache(machine_code._folder.__wrapped__)
    monkeypatch.setattr(machine_code, "_folder", fresh)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: options_without_machine_code(), range(8))]
    assert all(options == found[0] for options in found)
    assert Path(found[0]["xla_gpu_cuda_data_dir"], "bin", "ptxas").exists()
    folder = fresh()
    assert folder is not None
    folder.cleanup()
