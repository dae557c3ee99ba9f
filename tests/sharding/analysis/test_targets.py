"""Tests of targets: descriptions of GPUs that are read from a file."""

import pytest

from sharding.analysis.targets import parse_target


@pytest.mark.parametrize("number", ["0", "1.2.3", "9" * 400])
def test_memory_of_a_target_must_be_a_positive_number(number, tmp_path):
    path = tmp_path / "gpu.txtpb"
    path.write_text(f"gpu_device_info {{ device_memory_size: {number} }}")
    with pytest.raises(ValueError, match="device_memory_size: .* must be a positive number"):
        _ = parse_target(f"{path}:1x8").memory_bytes
