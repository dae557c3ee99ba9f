"""Lines and points are appended; what a crash or a full disk left behind does no harm."""

import json
import math
import os
import resource

import pytest

from untrusted.appender import Appender, JsonLines
from untrusted.files import NamedFile
from untrusted.tensorboard_file import TensorBoardFile


def test_a_torn_line_is_ended_and_numbers_in_mappings_are_json(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"st')
    for step in (2, 3):
        lines = JsonLines(path)
        lines.append({"step": step, "scores": {"a": math.nan, "b": -math.inf, "c": 0.1}})
        lines.close()
    first, torn, *others = path.read_text().splitlines()
    assert (first, torn) == ('{"step": 1}', '{"st')
    scores = {"a": "NaN", "b": "-Infinity", "c": 0.1}
    assert [json.loads(line) for line in others] == [{"step": s, "scores": scores} for s in (2, 3)]


def test_a_full_disk_is_an_error_unless_the_file_is_patient(tmp_path, monkeypatch, caplog):
    with NamedFile(os.open("/dev/full", os.O_WRONLY), tmp_path / "False", "w") as full:
        for is_patient in (False, True):
            file = Appender(tmp_path / f"{is_patient}", is_patient=is_patient)
            with monkeypatch.context() as patch:
                patch.setattr(file, "_file", full)
                if is_patient:
                    file.append(b"1")
                else:
                    with pytest.raises(OSError, match="No space left on device: '.*/False'"):
                        file.append(b"1")
            file.append(b"2")  # writes the 1 as well
            file.close()
            assert (tmp_path / f"{is_patient}").read_bytes() == b"12"
    assert caplog.text.count("the run continues") == 1


@pytest.mark.parametrize("kind", [JsonLines, TensorBoardFile])
def test_an_error_of_the_disk_names_the_file(kind, tmp_path):
    file = kind(tmp_path / "log")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # stands for a disk that fails
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/log"):
            for step in range(10):
                file.append({"step": step}) if kind is JsonLines else file.append(step, {"x": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.close()


@pytest.mark.parametrize("kind", [JsonLines, TensorBoardFile])
def test_links_are_not_followed(kind, tmp_path, monkeypatch):
    (tmp_path / "target").write_text("kept")
    monkeypatch.setattr("untrusted.tensorboard_file.time.time", lambda: 1.0)
    monkeypatch.setattr("untrusted.tensorboard_file.socket.gethostname", lambda: "host")
    name = f"events.out.tfevents.0000000001.000000.host.{os.getpid()}"
    (tmp_path / name).symlink_to("target")
    with pytest.raises(ValueError, match="is a symbolic link, which is not followed"):
        kind(tmp_path / name if kind is JsonLines else tmp_path)
    assert (tmp_path / "target").read_text() == "kept"
