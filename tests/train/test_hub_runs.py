"""Runs whose checkpoint, tokenizer and data are on the Hugging Face hub."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import transformers
import yaml

from tests.hub import TOKEN, StandInHub, use_hub
from tests.hugging_face import OPT, save_model
from tests.launch.launcher import REPOSITORY, variables
from train.lifecycle.exit_codes import FAILED, FINISHED, REFUSED
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(2, among="thorough")]

TEXT = Path(json.__file__).with_name("decoder.py").read_text()
FILES = {
    "README.md": b"# Texts",
    "data/train-0.txt": TEXT[:6000].encode(),
    "data/train-1.txt": TEXT[6000:9000].encode(),
    "data/validation-0.txt": TEXT[9000:11000].encode(),
    "data/test-0.txt": b"never downloaded",
}
SHORT = (
    "data.name=text",
    "data.sequence_length=16",
    "data.global_batch_size=8",
    "train.num_microbatches=2",
    "train.num_steps=4",
    "optimizer.warmup_steps=2",
    "log.every_steps=1",
    "eval.every_steps=2",
    "checkpoint.every_steps=2",
)
HUB = (*SHORT, "init_from=me/opt", "data.paths=hf://datasets/me/texts")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "opt"
    save_model(directory, "OPTForCausalLM", **OPT)
    return directory


@pytest.fixture
def filled_hub(hub: StandInHub, model: Path) -> StandInHub:
    hub.commit("me/opt", model)
    hub.commit("me/texts", FILES, kind="datasets")
    return hub


def flags(workdir: Path, overrides: tuple[str, ...]) -> list[str]:
    settings = (*overrides, f"data.cache_dir={workdir.parent}/cache")
    return [
        f"--config={REPOSITORY}/configs/opt_finetune.py",
        f"--workdir={workdir}",
        *(f"--config.{setting}" for setting in settings),
    ]


def losses(workdir: Path) -> list[tuple[int, float]]:
    lines = read_metrics(workdir / "metrics.jsonl")
    return [
        (line["step"], line[key]) for line in lines for key in ("loss", "eval_loss") if key in line
    ]


def closed_address() -> str:
    """Return an address at which no hub answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.thorough
def test_evaluation_reads_checkpoint_tokenizer_and_data(filled_hub, tmp_path, monkeypatch, capsys):
    arguments = [*flags(tmp_path / "run", HUB), "--mode=eval"]
    assert main(arguments) == FINISHED
    scores = capsys.readouterr().out
    assert "eval_loss" in scores
    downloads = {*filled_hub.downloads()}
    assert {"model.safetensors", "tokenizer.json", "data/validation-0.txt"} <= downloads
    assert "data/test-0.txt" not in downloads
    # Without a network, the cache has everything.
    use_hub(monkeypatch, closed_address(), tmp_path / "hf_home")
    assert main(arguments) == FINISHED
    assert capsys.readouterr().out == scores


@pytest.mark.parametrize("is_offline", [False, True])
def test_run_without_network_and_cache_is_refused(is_offline, tmp_path, monkeypatch, capsys):
    address = closed_address()
    use_hub(monkeypatch, address, tmp_path / "hf_home", is_offline=is_offline)
    # A restart may help if the hub cannot be reached.
    expected = REFUSED if is_offline else FAILED
    assert main(flags(tmp_path / "run", (*HUB, "init_from=runs/typo"))) == expected
    reason = "HF_HUB_OFFLINE is set" if is_offline else f"{address} cannot be reached"
    error = capsys.readouterr().err
    assert error.startswith("error: there is no path runs/typo on this machine, and the model ")
    assert reason in error and "run 'hf download runs/typo' where there is a network" in error


@pytest.mark.thorough
def test_run_equals_one_with_local_files(filled_hub, model, tmp_path, monkeypatch, capsys, caplog):
    """It reads them with a token, which appears nowhere."""
    filled_hub.commit("me/private", model, is_private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    local = (
        *SHORT,
        f"init_from={model}",
        f"data.paths={tmp_path}/data/train-*.txt",
        f"data.validation_paths={tmp_path}/data/validation-0.txt",
    )
    assert main(flags(tmp_path / "local", local)) == FINISHED
    assert main(flags(tmp_path / "run", (*HUB, "init_from=me/private"))) == FINISHED
    assert len(losses(tmp_path / "run")) == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "local")
    output = capsys.readouterr()
    assert TOKEN not in output.out + output.err + caplog.text
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files and not [path for path in files if TOKEN.encode() in path.read_bytes()]


@pytest.mark.thorough
def test_resumed_run_uses_the_commits_of_its_config(filled_hub, model, tmp_path, capsys):
    """The repositories are changed while the run is stopped."""
    commit = filled_hub.repositories["models", "me/opt"].revisions["main"]
    of_texts = filled_hub.repositories["datasets", "me/texts"].revisions["main"]
    workdir = tmp_path / "run"
    assert main(flags(workdir, HUB)) == FINISHED
    config = yaml.safe_load((workdir / "config.yaml").read_text())
    assert config["init_from"] == config["data"]["tokenizer"] == f"me/opt@{commit}"
    assert config["data"]["paths"] == [f"hf://datasets/me/texts@{of_texts}"]

    shutil.copytree(model, tmp_path / "newer")
    (tmp_path / "newer" / "extra.json").write_text("{}")
    newer = filled_hub.commit("me/opt", tmp_path / "newer")
    filled_hub.commit("me/texts", {"train.txt": b"other"}, kind="datasets")
    filled_hub.requests.clear()
    assert main(flags(workdir, (*HUB, "train.num_steps=6"))) == FINISHED
    assert filled_hub.downloads() == []
    assert [step for step, _ in losses(workdir)][-1] == 6
    assert yaml.safe_load((workdir / "config.yaml").read_text())["init_from"] == f"me/opt@{commit}"
    # A revision on the command line is not replaced.
    capsys.readouterr()
    error = refused(workdir, (*HUB, "init_from=me/opt@main"), capsys)
    assert f"init_from: 'me/opt@{commit}' -> 'me/opt@{newer}'" in error


@pytest.mark.thorough
def test_resumed_run_of_an_adapter_uses_the_commit_of_its_base(filled_hub, model, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["fc1"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, settings).save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_config.json"
    config = {**json.loads(file.read_text()), "base_model_name_or_path": "me/opt"}
    file.write_text(json.dumps(config))
    command = (*HUB, f"init_from={tmp_path}/adapter", "lora.rank=2", "lora.alpha=4")
    command += ("lora.targets=mlp.up",)
    assert main(flags(tmp_path / "run", command)) == FINISHED
    filled_hub.commit("me/opt", {"config.json": b"{}"})
    assert main(flags(tmp_path / "run", (*command, "train.num_steps=6"))) == FINISHED


def refused(workdir: Path, overrides: tuple[str, ...], capsys) -> str:
    """Start a run that must end before step 0, and return its error."""
    assert main(flags(workdir, overrides)) != FINISHED
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("init_from=me/none", "me/none is neither a path on this machine nor a public model"),
        ("init_from=me/opt@v9", "me/opt@v9: the model me/opt has no revision 'v9'"),
        ("data.tokenizer=me/none", "'hf download me/none'"),
        ("data.paths=hf://datasets/me/none", "'hf download --repo-type=dataset me/none'"),
        ("data.paths=hf://datasets/me/texts/no.txt", "no file of data in hf://datasets/me/texts@"),
        ("data.paths=hf://datasets/me/gated", "hf://datasets/me/gated@"),
        ("data.validation_paths=a=hf://datasets/me/none", "'hf download --repo-type=dataset me/n"),
        ("data.paths=hf://datasets/me", "must be of the form hf://datasets/OWNER/NAME"),
        ("init_from=hf://me/opt", "name a model as me/opt"),
        ("init_from=opt-125m", "opt-125m does not exist; correct the path of the model, or name"),
    ],
)
def test_bad_name_is_refused_before_data_is_read(setting, problem, filled_hub, tmp_path, capsys):
    filled_hub.commit("me/gated", FILES, kind="datasets", is_gated=True)
    error = refused(tmp_path / "run", (*HUB, setting), capsys)
    assert problem in error
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert not [path for path in filled_hub.downloads() if path.endswith(".txt")]


@pytest.mark.drawn(3, of="whole runs")
@pytest.mark.thorough
def test_processes_resolve_a_revision_once(filled_hub, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "launch.local",
            "--processes=2",
            "--devices_per_process=1",
            "--",
            sys.executable,
            "-m",
            "train.main",
            *flags(tmp_path / "run", (*HUB, "mesh.data=2")),
        ],
        cwd=REPOSITORY,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == FINISHED, done.stderr
    resolved = [each for each in filled_hub.requests if each.startswith("GET /api/models/me/opt")]
    assert resolved.count("GET /api/models/me/opt") == 1
