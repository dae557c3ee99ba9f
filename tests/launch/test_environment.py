"""Tests of `launch.environment`: the user's settings take precedence, and XLA knows our flags."""

import os
import subprocess
import sys

import pytest

from distributed.variables import CPU_XLA_FLAGS, merge_xla_flags
from launch import environment


def test_merge_xla_flags_keeps_the_users():
    ours = {"xla_a": "1", "xla_b": "2"}
    assert merge_xla_flags(ours, "") == "--xla_a=1 --xla_b=2"
    assert merge_xla_flags(ours, "--xla_b=9 --xla_c") == "--xla_a=1 --xla_b=9 --xla_c"
    assert merge_xla_flags(ours, "flags.txt") == "flags.txt"


def test_compiler_variables_for_gpus_keep_the_users():
    user = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    found = environment.compiler_variables("gpu", user)
    assert set(found) == {"XLA_PYTHON_CLIENT_MEM_FRACTION"}
    with pytest.raises(ValueError, match="platform='tpu' must be one of cpu, gpu"):
        environment.compiler_variables("tpu", user)


def test_gpu_variables_distribute_the_visible_gpus():
    user = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert environment.gpu_variables(1, 2, 2, user) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(ValueError, match="needs 6 GPUs, but CUDA_VISIBLE_DEVICES lists 4"):
        environment.gpu_variables(0, 3, 2, user)


def test_compiler_flags_are_known_to_xla():
    # XLA aborts if it does not know a flag, and its flags change from version to version.
    flags = merge_xla_flags(CPU_XLA_FLAGS, "")
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
