"""Tests of targets: descriptions of GPUs that are read from a file."""

import pytest

from predict.machines.targets import parse_target


@pytest.mark.parametrize("number", ["0", "1.2.3", "9" * 400])
def test_memory_of_a_target_must_be_a_positive_number(number, tmp_path):
    path = tmp_path / "gpu.txtpb"
    path.write_text(f"gpu_device_info {{ device_memory_size: {number} }}")
    with pytest.raises(ValueError, match="device_memory_size: .* must be a positive number"):
        _ = parse_target(f"{path}:1x8").memory_bytes


def test_missing_field_of_a_target_is_named_in_its_own_notation(tmp_path):
    path = tmp_path / "gpu.txtpb"
    path.write_text("gpu_device_info { device_memory_size: 1 }")
    with pytest.raises(ValueError, match="lacks memory_bandwidth; add this field"):
        _ = parse_target(f"{path}:1x8").memory_bytes_per_s


def test_endless_number_of_hosts_is_refused():
    with pytest.raises(ValueError, match="must be KIND:HOSTSxGPUS") as caught:
        parse_target(f"h100:{'9' * 5000}x8")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("network", [0.0, -25.0, float("nan"), float("inf")])
def test_network_of_a_target_must_have_a_bandwidth(network):
    with pytest.raises(ValueError, match="--network=.* must be a positive number of Gbit/s"):
        parse_target("h100:2x8", network)


@pytest.mark.parametrize(
    ("num_devices", "name"), [(1, "1x1"), (6, "2x3"), (8, "2x4"), (7, "7x1"), (16, "4x4")]
)
def test_resized_target_has_as_many_gpus_as_asked_for(num_devices, name):
    found = parse_target("h100:3x4").resized(num_devices)
    assert (found.num_devices, found.name) == (num_devices, f"h100:{name}")
