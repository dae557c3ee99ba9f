"""Published jobs of LiBai: their rows, the fit, the ranks, and the tables of the docs."""

import dataclasses
import json

import pytest

from benchmarks.harness import docs_page, ranks
from benchmarks.published import libai, libai_fit
from benchmarks.published.libai_fit import Constants, StepParts
from benchmarks.published.libai_rows import COLUMNS, MODELS, jobs_of, parse_rows
from predict.machines.targets import parse_target
from predict.time.prediction import CollectiveTime, Prediction
from train.config.config_files import load
from train.config.schema import validate_config

ROWS = parse_rows(libai._PUBLISHED.read_text(encoding="utf-8"))
NAME = "nl24_fp16_4x2x1_ac_mb128_gb4096_1n8g"


def table(*lines: str) -> str:
    return "\n".join([",".join(COLUMNS), *lines])


def test_name_of_a_row_states_its_job():
    (row,) = parse_rows(table(f"3-D Parallel,BERT,{NAME},175.94,172.0"))
    assert (row.section, row.model, row.name) == ("3-D Parallel", "BERT", NAME)
    assert (row.libai_samples_per_s, row.megatron_samples_per_s) == (175.94, 172.0)
    assert (row.num_layers, row.data, row.tensor, row.pipeline) == (24, 4, 2, 1)
    assert (row.recomputes, row.micro_batch_size, row.global_batch_size) == (True, 128, 4096)
    assert (row.num_hosts, row.gpus_per_host, row.num_gpus) == (1, 8, 8)
    assert (row.num_microbatches, row.target, row.is_fitted) == (8, "v100:1x8", False)
    without = NAME.replace("_ac", "").replace("4x2", "8x1").replace("gb4096", "gb1024")
    (row,) = parse_rows(table(f"Data Parallel,GPT-2,{without},2,1"))
    assert not row.recomputes
    assert row.is_fitted
    assert row.num_microbatches == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,BERT,nl24,1,1", "must have the form nl24_fp16"),
        (f"a,BERT,{NAME}x,1,1", "must have the form nl24_fp16"),
        (f"a,BERT,{NAME.replace('fp16', 'bf16')},1,1", "must have the form nl24_fp16"),
        (f"a,BERT,{NAME.replace('24', '٢٤')},1,1", "must have the form nl24_fp16"),
        (f"a,BERT,{NAME},1", "line 2 has 4 cells; it must have 5"),
        (f"a,BERT,{NAME},fast,1", "line 2: 'fast' is not a number of samples per second"),
        (f"a,BERT,{NAME},-1,1", "libai_samples_per_s=-1.0 must be positive"),
        (f"a,BERT,{NAME},1,nan", "megatron_samples_per_s=nan must be positive"),
        (f"a,BERT,{NAME.replace('nl24', 'nl0')},1,1", "num_layers=0 must be positive"),
        (f"a,T5,{NAME},1,1", "model 'T5' is unknown; use BERT, GPT-2"),
        (f"a,BERT,{NAME.replace('1n', '2n')},1,1", "has 8 GPUs, but 2 × 8 are named"),
        (f"a,BERT,{NAME.replace('4096', '4097')},1,1", "must divide the global batch of 4097"),
    ],
)
def test_bad_rows_are_refused(line, message):
    with pytest.raises(ValueError, match=message):
        parse_rows(table(line))


def test_rows_of_one_job_must_agree():
    first = f"a,BERT,{NAME},2,1"
    assert len(jobs_of(parse_rows(table(first, first.replace("a,", "b,"))))) == 1
    with pytest.raises(ValueError, match="appears twice, with different speeds"):
        parse_rows(table(first, f"b,BERT,{NAME},3,1"))


def test_file_without_the_columns_is_refused():
    with pytest.raises(ValueError, match="the first line must be section,model"):
        parse_rows(f"a,BERT,{NAME},1,1")
    with pytest.raises(ValueError, match="the first line must be section,model"):
        parse_rows("")


def test_published_rows_are_all_there():
    assert len(ROWS) == 44
    assert len(jobs_of(ROWS)) == 42
    assert sum(row.is_fitted for row in jobs_of(ROWS)) == 12


@pytest.mark.drawn(8)
@pytest.mark.parametrize("row", jobs_of(ROWS), ids=lambda row: f"{row.model} {row.name}")
def test_config_of_a_row_is_valid_on_its_gpus(row):
    config = validate_config(load(str(libai._ROOT / "configs" / MODELS[row.model]), row.overrides))
    assert config.mesh.num_devices == parse_target(row.target).num_devices == row.num_gpus
    assert config.model_fields["embed_dim"] == 1024
    assert config.model_fields["num_heads"] == 16
    assert config.data.sequence_length == (512 if row.model == "BERT" else 1024)
    assert {f"--config.{override}" for override in row.overrides} <= {
        *libai.command_of(row).split()
    }


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((1, 2, 3), (10, 20, 30), 1),
        ((1, 2, 3), (3, 2, 1), -1),
        ((1, 2, 3, 4), (1, 2, 4, 3), 4 / 6),
        ((1, 1, 2), (1, 2, 3), 2 / 6**0.5),
    ],
)
def test_kendall_tau_is_the_share_of_pairs_in_order(first, second, expected):
    assert ranks.kendall_tau(first, second) == pytest.approx(expected)


def test_kendall_tau_refuses_jobs_without_an_order():
    with pytest.raises(ValueError, match="at least two speeds must differ"):
        ranks.kendall_tau((1, 1), (1, 2))
    with pytest.raises(ValueError, match="3 and 2 speeds; each job needs both"):
        ranks.kendall_tau((1, 2, 3), (1, 2))


def test_regret_is_what_the_predicted_choice_loses():
    assert ranks.regret((1, 3, 2), (10, 30, 20)) == 0
    assert ranks.regret((1, 2, 3), (10, 40, 30)) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="0 predicted and 1 measured"):
        ranks.regret((), (1,))


def parts_of(row, *, matmul=1.0, other=1.0, network=1.0):
    """Return parts that take LiBai's time with these constants."""
    step_s = row.global_batch_size / row.libai_samples_per_s
    crosses_hosts = row.num_hosts > 1
    shares = (0.6, 0.2, 0.2) if row.recomputes else (0.4, 0.4, 0.2)
    return StepParts(
        matmul_s=shares[0] * step_s / matmul,
        other_s=shares[1] * step_s / other,
        links_s=0.0 if crosses_hosts else shares[2] * step_s,
        network_s=shares[2] * step_s / network if crosses_hosts else 0.0,
        bubble_s=0.0,
    )


def test_fit_finds_the_constants_from_fitted_rows_only():
    constants = {"matmul": 1.25, "other": 0.8, "network": 0.5}
    parts = {row.key: parts_of(row, **constants) for row in ROWS}
    found = libai_fit.fit(ROWS, parts)
    assert dataclasses.asdict(found) == pytest.approx(constants, rel=1e-3)
    changed = [
        row
        if row.is_fitted
        else dataclasses.replace(row, libai_samples_per_s=7 * row.libai_samples_per_s)
        for row in ROWS
    ]
    only_fitted = {row.key: parts[row.key] for row in ROWS if row.is_fitted}
    assert libai_fit.fit(changed, only_fitted) == found
    slower = [
        dataclasses.replace(row, libai_samples_per_s=row.libai_samples_per_s / 2)
        if row.is_fitted
        else row
        for row in ROWS
    ]
    assert libai_fit.fit(slower, parts).matmul > 1.5 * found.matmul


def test_fitted_rows_have_one_gpu_or_replicas_only():
    assert {(row.tensor, row.pipeline) for row in ROWS if row.is_fitted} == {(1, 1)}
    assert all(row.tensor > 1 or row.pipeline > 1 for row in ROWS if not row.is_fitted)


def test_step_scales_each_part_and_the_bubble_with_the_kernels():
    parts = StepParts(matmul_s=2, other_s=2, links_s=0.5, network_s=1, bubble_s=1)
    assert libai_fit.UNFITTED.step_s(parts) == 6.5
    constants = Constants(matmul=2, other=1, network=3)
    assert constants.step_s(parts) == 4 + 2 + 0.5 + 3 + 1.5


def test_parts_separate_communication_across_hosts():
    def collective(axis: str, exposed_s: float) -> CollectiveTime:
        return CollectiveTime(
            kind="all-reduce",
            axes=(axis,),
            loop="",
            count=1,
            bytes=1,
            seconds=2 * exposed_s,
            exposed_s=exposed_s,
            is_async=False,
            is_overlapped=False,
        )

    prediction = Prediction(
        step_s=10,
        matmul_s=4,
        attention_s=1,
        other_s=2,
        communication_s=4,
        exposed_communication_s=2,
        host_s=0,
        exposed_host_s=0,
        bubble_s=1,
        collectives=(collective("data", 1.5), collective("model", 0.5)),
        run=None,  # pyright: ignore[reportArgumentType]
    )
    parts = StepParts.of_prediction(prediction, {"data": 2, "model": 8}, gpus_per_host=8)
    assert parts == StepParts(matmul_s=4, other_s=3, links_s=0.5, network_s=1.5, bubble_s=1)
    assert libai_fit.UNFITTED.step_s(parts) == prediction.step_s


def test_choices_compare_meshes_of_one_model_and_number_of_gpus():
    speeds = {row.key: row.libai_samples_per_s for row in ROWS}
    found = libai_fit.choices(ROWS, speeds)
    assert {choice.regret for choice in found} == {0.0}
    assert {choice.num_gpus for choice in found} == {4, 8, 16, 32}
    assert {choice.num_layers for choice in found} == {24}  # 48 layers have one mesh only
    assert len(found) == 8
    opposite = libai_fit.choices(ROWS, {key: -speed for key, speed in speeds.items()})
    assert all(choice.regret > 0.3 for choice in opposite)


def test_docs_show_the_stored_results():
    results = json.loads(libai._RESULTS.read_text(encoding="utf-8"))
    text = libai._DOCS.read_text(encoding="utf-8")
    assert docs_page.with_tables(libai._DOCS, libai.tables(ROWS, results)) == text


def test_stored_constants_are_the_fit_of_the_stored_steps():
    results = json.loads(libai._RESULTS.read_text(encoding="utf-8"))
    parts = libai.parts_of(results, ROWS)
    found = libai_fit.fit(ROWS, parts)
    assert dataclasses.asdict(found) == pytest.approx(results["constants"], rel=1e-4)
    for row in jobs_of(ROWS):
        job = results["jobs"][f"{row.model} {row.name}"]
        assert job["command"] == libai.command_of(row)
        assert libai_fit.UNFITTED.step_s(parts[row.key]) == pytest.approx(job["step_time_s"])


def test_predictions_rank_the_jobs_of_each_model_and_find_the_fastest():
    """The goals of the benchmark: τ of at least 0.8 and a regret of at most 5 %."""
    results = json.loads(libai._RESULTS.read_text(encoding="utf-8"))
    parts = libai.parts_of(results, ROWS)
    constants = Constants(**results["constants"])
    speeds = {row.key: constants.samples_per_s(row, parts[row.key]) for row in ROWS}
    for model in MODELS:
        jobs = [row for row in jobs_of(ROWS) if row.model == model]
        for chosen in (jobs, [row for row in jobs if not row.is_fitted]):
            predicted = [speeds[row.key] for row in chosen]
            assert ranks.kendall_tau(predicted, [row.libai_samples_per_s for row in chosen]) >= 0.8
    assert max(choice.regret for choice in libai_fit.choices(ROWS, speeds)) <= 0.05
