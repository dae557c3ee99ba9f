"""`python -m train.plan`: plans of small models for described GPUs."""

import dataclasses
import json
import re

import pytest
import yaml

from predict.machines.targets import parse_target
from sharding.tensor import modes_of
from tests.hugging_face import save_model
from tests.runs import ROOT
from train import plan
from train.compile import compile_run, load_config, run_for
from train.config.config_files import as_yaml, load
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.planning import plan_search
from train.planning.layer_times import CompiledReplica, ReplicaStep
from train.planning.memory.budget import needs_of, target_budget
from train.planning.parallel_plan import PlanSpace
from train.planning.plan_devices import described_devices

pytestmark = pytest.mark.gpu_compiler

CONFIG = f"{ROOT}/configs/gpt2.py"
FIXED = [
    "data.tokenizer=bytes",
    "data.global_batch_size=8",
    "model.embed_dim=512",
    "model.num_layers=4",
    "model.num_heads=4",
    "precision.compute=bfloat16",
    "train.num_microbatches=4",
    "train.remat=none",
    "train.unroll=false",
    "memory.zero_stage=0",
    "pipeline.schedule=1f1b",
    "pipeline.share_vocab=false",
]
ARGUMENTS = [f"--config.{override}" for override in FIXED]


def run_plan(capfd, *arguments: str) -> tuple[int, str, str]:
    """Run the command; return (exit code, standard output, standard error)."""
    code = plan.main([f"--config={CONFIG}", *ARGUMENTS, *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_best_plan_is_the_best_of_all(capfd, tmp_path, monkeypatch):
    """The plan with the least composed cost is the fastest of all plans, as compiled whole."""
    monkeypatch.setattr(plan_search, "NUM_PLANS", 1)
    out = tmp_path / "plan.yaml"
    code, text, _ = run_plan(capfd, "--target=h100:1x2", "--json", f"--out={out}")
    assert code == 0
    report = json.loads(text)
    assert report["num_devices"] == 2
    (best,) = report["plans"]

    overrides = Overrides.parse(ARGUMENTS)
    config = validate_config(load_config(CONFIG, overrides))
    target = parse_target("h100:1x2")
    space = PlanSpace(
        config=config,
        num_devices=2,
        fixed=overrides.keys,
        num_layers=4,
        layer_remats=("none",),
        allows=lambda mesh: True,
        sees_whole_batch=False,
        has_experts=False,
        can_share_vocab=True,
        cuts=lambda num_chunks, share_vocab: [()],
    )
    plans = [*space]
    assert len(plans) == 3  # two stages, two replicas, or a model split in two
    settings = [json.loads(json.dumps(each.settings())) for each in plans]  # tuples become lists
    others = [each for each, own in zip(plans, settings, strict=True) if own != best["settings"]]
    assert len(others) == 2
    for each in others:
        step = compile_run(run_for(each.applied(config), target))
        assert best["predicted"]["step_time_s"] < step.prediction.step_s

    # The file is a complete config, which keeps everything else.
    saved = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert saved["mesh"]["data"] == best["settings"]["mesh.data"]
    others = tuple(override for override in overrides.command_line if "mesh" not in override.key)
    without_mesh = load(CONFIG, Overrides(command_line=others))
    assert saved["data"]["paths"] == list(without_mesh.data.paths)
    assert validate_config(load(str(out))).train.num_microbatches == 4


def test_best_mode_of_tensor_parallelism_is_the_best_of_all(capfd):
    """All modes of a plan whose `mesh.model` is fixed are compiled, and the fastest is the best."""
    fixed = ["--config.mesh.model=4", "--config.train.num_microbatches=1"]
    fixed += ["--config.model.embed_dim=2048", "--config.data.sequence_length=1024"]
    fixed += ["--config.model.num_layers=2"]
    code, text, _ = run_plan(capfd, "--target=h100:1x4", "--json", *fixed)
    assert code == 0
    best = json.loads(text)["plans"][0]
    assert best["settings"]["tensor.mode"] == "2d"

    overrides = Overrides.parse([*ARGUMENTS, *fixed])
    config = validate_config(load_config(CONFIG, overrides))
    target = parse_target("h100:1x4")
    seconds = {}
    for tensor in modes_of(4):
        run = run_for(dataclasses.replace(config, tensor=tensor), target)
        seconds[tensor.mode] = compile_run(run).prediction.step_s
    assert len(seconds) == 2
    assert best["predicted"]["step_time_s"] == pytest.approx(min(seconds.values()))
    assert seconds["2d"] < seconds["1d"]


def test_layers_of_the_best_plan_are_unrolled_if_that_is_faster(capfd, tmp_path):
    fixed = ["--config.mesh.data=2", "--config.mesh.pipeline=1", "--config.model.num_layers=6"]
    fixed += ["--config.train.num_microbatches=1"]
    open_arguments = [each for each in ARGUMENTS if "unroll" not in each]
    out = tmp_path / "plan.yaml"
    options = [*open_arguments, *fixed, "--target=h100:1x2", "--json", f"--out={out}"]
    assert plan.main([f"--config={CONFIG}", *options]) == 0
    plans = json.loads(capfd.readouterr().out)["plans"]
    unrolled, loop = sorted(plans, key=lambda each: "train.unroll" not in each["settings"])
    assert unrolled["settings"] == loop["settings"] | {"train.unroll": True}
    assert plans[0] == unrolled  # the fastest
    saved = validate_config(load(str(out)))
    assert saved.train.unroll
    seconds = compile_run(run_for(saved, parse_target("h100:1x2"))).prediction.step_s
    assert seconds == pytest.approx(unrolled["predicted"]["step_time_s"])
    assert seconds < loop["predicted"]["step_time_s"]


def test_plan_without_a_pipeline_replaces_the_stages_of_its_config(tmp_path, capfd):
    """The file of the plan is legal, and the printed options are the same."""
    own = tmp_path / "own.yaml"
    stages = ["mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"]
    stages += ["pipeline.layers_per_stage=1,1,1,1", "mesh.auto=true"]
    shape = [each for each in FIXED if each.partition("=")[0] not in ("pipeline.schedule",)]
    config = load(CONFIG, [*shape, *stages])
    own.write_text(as_yaml(config.to_dict()), encoding="utf-8")
    out = tmp_path / "plan.yaml"
    options = [f"--config={own}", "--target=h100:1x2", f"--out={out}", "--config.mesh.pipeline=1"]
    assert plan.main(options) == 0
    printed = capfd.readouterr().out.splitlines()[-1]
    saved = validate_config(load(str(out)))
    assert not saved.mesh.auto and saved.pipeline.layers_per_stage == ()
    assert compile_run(run_for(saved, parse_target("h100:1x2"))).prediction.step_s > 0
    assert "--config.mesh.auto=False" in printed
    assert "--config.pipeline.chunks=1" in printed


def test_part_has_the_times_of_its_own_layers():
    """The forward is a part of the step, and takes longer for twice the batch."""
    config = validate_config(load_config(CONFIG, Overrides.parse(ARGUMENTS)))
    target = parse_target("h100:1x8")
    parts = [
        CompiledReplica(
            ReplicaStep(context=1, expert=1, model=1, batch=batch, remat="none"),
            config,
            described_devices(target, target_budget(config.memory, target), run_for),
        )
        for batch in (16, 32)
    ]
    one, two = (part.times for part in parts)
    assert 0.1 * one.step_s < one.forward_s < 0.4 * one.step_s
    assert 1.2 < two.forward_s / one.forward_s < 2.1
    assert parts[1].memory.activations == pytest.approx(2 * parts[0].memory.activations, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--target=h100:1x7"],
            r"no plan divides .*\.global_batch_size=8 over 7 .* that works: ",
        ),
        (["--target=h100:1x8", "--config.mesh.model=3"], r"model=3"),
        (
            ["--target=h100:1x8", "--config.mesh.data=5"],
            r"mesh\.data=5 must divide the 8 devices; the nearest that works is mesh\.data=4",
        ),
    ],
)
def test_request_without_a_plan_ends_in_one_sentence(arguments, message, capfd):
    code, text, err = run_plan(capfd, *arguments)
    assert code == 2
    assert text == ""
    (error,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert re.search(message, error)


def test_named_remedies_for_too_little_memory_are_enough(capfd):
    budget = "--config.memory.device_budget="
    code, text, err = run_plan(capfd, "--target=h100:1x1", f"{budget}0.09")
    assert (code, text) == (2, "")
    found = re.search(
        r"no plan fits into 92\.2 MiB a device; the leanest, .*; what would fit: "
        r"(\d+) devices like these, or devices with ([\d.]+) MiB for a step",
        err,
    )
    assert found
    more, mebibytes = found.groups()
    enough = float(mebibytes) / 1024
    assert run_plan(capfd, "--target=h100:1x1", f"{budget}{enough}")[0] == 0
    assert run_plan(capfd, f"--target=h100:1x{more}", f"{budget}0.09")[0] == 0


def test_plan_that_fits_only_as_compiled_is_found(capfd):
    """The fastest plan's estimate exceeds the budget, but its compiled step does not."""
    overrides = [
        "model.num_layers=8",
        "model.embed_dim=512",
        "model.num_heads=8",
        "data.sequence_length=512",
        "data.global_batch_size=64",
        "precision.compute=bfloat16",
        "memory.device_budget=0.49",
    ]
    options = [f"--config.{override}" for override in overrides]
    assert plan.main([f"--config={CONFIG}", "--target=h100:1x4", "--json", *options]) == 0
    best = json.loads(capfd.readouterr().out)["plans"][0]
    assert best["settings"]["train.num_microbatches"] == 1
    assert best["settings"]["train.remat"] == "stage,full"
    assert best["predicted"]["step_time_s"] < 0.009
    overrides += [f"{key}={value}" for key, value in best["settings"].items()]
    config = load_config(CONFIG, overrides)
    target = parse_target("h100:1x4")
    run = run_for(validate_config(config), target)
    budget = target_budget(run.config.memory, target)
    assert needs_of(run, budget).device_bytes > budget.device_bytes


#: A class and its config.
_OPT = (
    "OPTForCausalLM",
    {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "hidden_size": 512,
        "word_embed_proj_dim": 512,
        "ffn_dim": 2048,
    },
)
#: Config -> the Hugging Face model that it continues.
_CONTINUES = {
    "bert_classify": (
        "BertForMaskedLM",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "hidden_size": 512,
            "intermediate_size": 2048,
        },
    ),
    "opt_finetune": _OPT,
    "chat_finetune": _OPT,
    "dpo": _OPT,
}
_CONFIGS = sorted(
    path.stem
    for path in (ROOT / "configs").glob("*.py")
    if path.stem not in ("__init__", "common", "sizes")
)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x1", "h100:1x8", "h100:512x8"])
@pytest.mark.parametrize("name", [*_CONFIGS, "gated_mean"])
def test_every_shipped_config_has_a_plan(name, target, capfd, tmp_path):
    path = f"{ROOT}/configs/{name}.py"
    if name == "gated_mean":  # a user's own model
        path = f"{ROOT}/docs/examples/gated_mean_config.py"
    overrides = ["precision.compute=bfloat16"]
    if name in _CONTINUES:
        model_class, sizes = _CONTINUES[name]
        save_model(tmp_path, model_class, **sizes)
        overrides.append(f"init_from={tmp_path}")
    overrides += ["data.global_batch_size=4096"] * (target == "h100:512x8")
    options = [f"--config.{override}" for override in overrides]
    assert plan.main([f"--config={path}", f"--target={target}", "--json", *options]) == 0
    report = json.loads(capfd.readouterr().out)
    times = [each["predicted"]["step_time_s"] for each in report["plans"]]
    assert times == sorted(times) and times[0] > 0
    assert all(each["composed_step_time_s"] >= times[0] for each in report["runners_up"])
    assert all(each["memory"]["fits"] for each in report["plans"])
