"""Configs with huge numbers are refused in one sentence, quickly and in little memory."""

import json
import subprocess
import sys

import pytest

from tests.limits import MAX_BYTES, MAX_SECONDS
from tests.runs import ROOT, write_corpus
from train.lifecycle.exit_codes import REFUSED

_BILLION = 10**9
#: Config, overrides -> parts of the message: name and value, rule, remedy. The first case decides
#: how many devices all of them have.
CASES = {
    ("gpt2", f"mesh.model={10**6}"): (
        "mesh model=1000000 needs 1000000 devices",
        "but 512 are available",
        "meshes that fit: model=500",
    ),
    ("gpt2", f"mesh.data={10**6} data.global_batch_size={10**6}"): (
        "mesh data=1000000 needs 1000000 devices",
        "but 512 are available",
        "meshes that fit: data=500",
    ),
    ("gpt2", f"model.num_layers={_BILLION}"): (
        "model.num_layers=1000000000",
        "must be at most 10000",
        "choose fewer layers",
    ),
    ("t5", f"model.num_decoder_layers={_BILLION}"): (
        "model.num_decoder_layers=1000000000",
        "must be at most 10000",
        "choose fewer layers",
    ),
    ("swin", f"model.depths={_BILLION},2"): (
        "model.depths=(1000000000, 2)",
        "more than 10000 blocks",
        "choose fewer",
    ),
    ("gpt2", f"train.num_microbatches={_BILLION}"): (
        "train.num_microbatches=1000000000",
        "must be from 1 to 4096",
        "choose fewer microbatches",
    ),
    ("gpt2", f"model.embed_dim={10**12}"): (
        "model.embed_dim=1000000000000",
        "must be an integer from -2147483647 to 2147483647",
        "choose one in this range",
    ),
    ("gpt2", f"model.embed_dim={2**31 - 4}"): (  # One dimension of the MLP is four times as large.
        "the shape [2147483644, 8589934576]",
        "no dim may be more than 2147483647",
        "reduce the sizes in the section model",
    ),
    (
        "gpt2",
        "pipeline.chunks=10000 train.num_microbatches=16 pipeline.schedule=gpipe mesh.pipeline=8",
    ): (
        "pipeline.schedule=gpipe: a table of 8 stages, 10000 chunks per stage and 16 microbatches",
        "must be at most 262144",
        "choose fewer microbatches",
    ),
}

#: Starts runs in a process of its own, because jax chooses the number of simulated devices only
#: once. Memory used by imports is not counted.
_SCRIPT = """
import contextlib, io, json, resource, sys, time
from train.main import main

results = []
for arguments in json.loads(sys.argv[1]):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = main(arguments)
    seconds = time.process_time() - start
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.append([code, stderr.getvalue(), seconds, 1024 * kib])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[tuple[str, str], list]:
    """Case -> exit code, standard error, seconds of processor time, and bytes allocated."""
    directory = tmp_path_factory.mktemp("huge")
    commands = []
    for name, overrides in CASES:
        given = [*overrides.split(), "train.compilation_cache=False"]
        if name in ("gpt2", "t5"):
            given = ["data.name=text", "data.tokenizer=bytes", *write_corpus(directory), *given]
        flags = [f"--config.{override}" for override in given]
        workdir = directory / "run"
        commands.append([f"--config={ROOT}/configs/{name}.py", f"--workdir={workdir}", *flags])
    command = [sys.executable, "-c", _SCRIPT, json.dumps(commands)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert not (directory / "run").exists()
    *_, printed = ended.stdout.splitlines()
    return dict(zip(CASES, json.loads(printed), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1].split()[0])
def test_huge_number_is_refused_quickly_in_one_sentence(case, results):
    code, stderr, seconds, num_bytes = results[case]
    assert code == REFUSED and "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    for part in CASES[case]:
        assert part in line
    assert len(line) < 500
    assert seconds < MAX_SECONDS
    assert num_bytes < MAX_BYTES
