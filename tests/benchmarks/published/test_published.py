"""The page of published jobs: every config is valid, and the tables show the stored figures."""

import json

import pytest

from benchmarks.harness import docs_page
from benchmarks.published import __main__ as published
from benchmarks.published.jobs import GROUPS, HOST_MEMORY
from predict.machines.targets import parse_target
from train.config.config_files import load
from train.config.schema import validate_config

ALL_JOBS = [job for jobs in GROUPS.values() for job in jobs]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("job", ALL_JOBS, ids=lambda job: job.name)
def test_mesh_of_a_job_has_the_gpus_of_its_target(job):
    path = str(published._ROOT / "configs" / job.config)
    config = validate_config(load(path, list(job.overrides)))
    assert config.mesh.num_devices == parse_target(job.target).num_devices
    command = published.command_of(job).split()
    assert command[:3] == ["python", "-m", "train.compile"]
    assert {f"--config.{override}" for override in job.overrides} <= set(command)


def test_docs_show_the_stored_results():
    results = json.loads(published._RESULTS.read_text(encoding="utf-8"))
    for name, jobs in GROUPS.items():
        assert [job["name"] for job in results[name]] == [job.name for job in jobs]
    text = published._DOCS.read_text(encoding="utf-8")
    assert docs_page.with_tables(published._DOCS, published.tables(results)) == text


def test_table_shows_the_ratio_only_where_a_speed_is_published():
    row = {
        "name": "model",
        "mesh": {"data": 8},
        "compiled_bytes": 2**31,
        "step_time_s": 1.5,
        "tokens_per_s_per_gpu": 3000.0,
        "exposed": 0.0125,
        "mfu": 0.5,
        "published": 1500.0,
        "source": "somebody",
    }
    known, unknown = published.table([row, row | {"published": None}]).splitlines()[2:]
    assert known == (
        "| model | data=8 | 2.0 | 1,500 | 3,000 | 1.2% | 50.0% | 1,500 (somebody) | 2.00 |"
    )
    assert unknown.endswith("| 50.0% | – | – |")


def test_stored_jobs_in_host_memory_fit_and_have_the_published_number_of_parameters():
    results = json.loads(published._RESULTS.read_text(encoding="utf-8"))["host_memory"]
    assert [job["name"] for job in results] == [job.name for job in HOST_MEMORY]
    for job, billions in zip(results, (1.5, 18, 24), strict=True):
        assert job["num_params"] >= billions * 1e9
        assert job["compiled_bytes"] <= job["budget_bytes"] <= 0.91 * job["published"] * 1e9
        assert job["fits"]


def test_table_of_host_memory_shows_both_memories():
    job = {
        "name": "GPT",
        "num_params": 1.56e9,
        "published": 6,
        "source": "somebody",
        "compiled_bytes": 2**32,
        "fits": True,
        "host_bytes": 2**35,
        "tokens_per_s_per_gpu": 4420.4,
    }
    last = published.memory_table([job]).splitlines()[-1]
    assert last == "| GPT | 1.6 B | 6 GB (somebody) | 4.0 | yes | 32 | 4,420 |"
