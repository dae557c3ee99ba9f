"""The space of plans that `python -m train.plan` chooses from."""

import dataclasses
import math

import pytest

from tests.runs import ROOT
from train.config.config_files import load
from train.config.schema import RunConfig
from train.planning.parallel_plan import PlanSpace, open_config, with_open_choices


def config_of(*overrides: str) -> RunConfig:
    sizes = ("data.global_batch_size=16", "model.num_layers=4")
    fixed = {override.partition("=")[0] for override in overrides}
    return open_config(load(f"{ROOT}/configs/gpt2_3d.py", (*sizes, *overrides)), fixed)


def space(num_devices: int = 8, *overrides: str, most_model: int = 4, **values) -> PlanSpace:
    """Return the space of a config whose overrides are fixed."""
    given = {
        "num_layers": 4,
        "sees_whole_batch": False,
        "can_share_vocab": False,
        "has_experts": False,
        "cuts": lambda num_chunks, share_vocab: [()] * (4 % num_chunks == 0),
    }
    return PlanSpace(
        config=config_of(*overrides),
        num_devices=num_devices,
        fixed={override.partition("=")[0] for override in overrides},
        layer_remats=("none", "full"),
        allows=lambda mesh: mesh.model <= most_model,
        **(given | values),
    )


def test_plans_divide_the_small_batches_of_a_ramp_up():
    sizes = ("data.global_batch_size=32", "data.rampup_batch_size=12,4,100")
    config = config_of(*sizes)
    plans = [*space(2, *sizes)]
    for plan in plans:
        assert plan.applied(config).train.num_microbatches == plan.num_microbatches
    counts = {plan.num_microbatches for plan in plans}
    assert counts == {1, 2, 8, 16, 32}  # with 4, a batch of 20 would have 3 microbatches
    assert 4 in {plan.num_microbatches for plan in space(2, *sizes[:1])}


def test_meshes_divide_all_devices_over_pipeline_data_and_model():
    found = {(mesh.pipeline, mesh.data, mesh.model) for mesh in space().meshes()}
    # pipeline=8 has more stages than layers, and the model cannot be split into 8.
    expected = {
        (p, d, m) for p in (1, 2, 4) for d in (1, 2, 4, 8) for m in (1, 2, 4) if p * d * m == 8
    }
    assert found == expected
    assert all(mesh.fsdp == mesh.context == mesh.expert == 1 for mesh in space().meshes())


def test_experts_are_divided_over_devices_that_have_examples_of_their_own():
    meshes = [*space(8, "mesh.pipeline=1", has_experts=True).meshes()]
    found = {(mesh.data, mesh.expert, mesh.model) for mesh in meshes}
    assert found == {
        (d, e, m) for d in (1, 2, 4, 8) for e in (1, 2, 4, 8) for m in (1, 2, 4) if d * e * m == 8
    }
    plans = [*space(8, "mesh.pipeline=1", "data.global_batch_size=4", has_experts=True)]
    assert {plan.num_replicas for plan in plans} == {2, 4}
    assert all(4 % (plan.mesh.data * plan.mesh.expert) == 0 for plan in plans)
    fixed = space(8, "mesh.expert=2", has_experts=True).meshes()
    assert {mesh.expert for mesh in fixed} == {2}


def test_modes_of_tensor_parallelism_keep_the_batch():
    plans = [*space(8, "mesh.model=4", "mesh.pipeline=1", "data.global_batch_size=8")]
    assert {plan.tensor.mode for plan in plans} == {"1d"}
    counts = {}
    for plan in plans:
        (other,) = plan.in_other_modes(8)
        assert (other.tensor.mode, other.num_replicas) == ("2d", 2 * plan.num_replicas)
        assert other.applied(config_of()).num_replicas == 4
        counts[plan.num_microbatches] = other.num_microbatches
    assert counts == {1: 1, 2: 2, 4: 2}  # the two replicas become four, with 2 examples each
    one = [*space(8, "mesh.model=4", "mesh.pipeline=1", "data.global_batch_size=2")]
    assert [*one[0].in_other_modes(2)] == []


def test_fixed_mode_of_tensor_parallelism_stays_as_it_is():
    fixed = ("tensor.mode=2.5d", "tensor.depth=2", "mesh.pipeline=1", "train.num_microbatches=1")
    plans = [*space(8, *fixed, most_model=8)]
    assert {(plan.mesh.data, plan.mesh.model) for plan in plans} == {(4, 2), (1, 8)}
    assert {plan.num_replicas for plan in plans} == {8, 4}
    assert all(plan.settings()["tensor.depth"] == 2 for plan in plans)


def test_fixed_unrolling_leaves_meshes_without_a_pipeline():
    plans = [*space(8, "train.unroll=true")]
    assert {plan.mesh.pipeline for plan in plans} == {1}
    assert all(plan.settings()["train.unroll"] is True for plan in plans)
    assert next(iter(space(8))).settings()["train.unroll"] is False


@pytest.mark.parametrize(
    ("override", "name"),
    [("mesh.model=2", "model"), ("mesh.pipeline=4", "pipeline"), ("mesh.fsdp=2", "fsdp")],
)
def test_fixed_axis_stays_as_it_is(override, name):
    sizes = {getattr(mesh, name) for mesh in space(8, override).meshes()}
    assert sizes == {int(override.partition("=")[2])}


def test_fixed_numbers_of_layers_fit_only_some_meshes():
    plans = [*space(8, "pipeline.layers_per_stage=3,1")]
    assert {plan.mesh.pipeline * plan.chunks for plan in plans} == {2}
    assert [*space(8, "pipeline.layers_per_stage=3,2")] == []  # the model has 4 layers


def test_schedule_of_a_table_in_a_file_is_refused():
    with pytest.raises(ValueError, match=r"'own\.csv' cannot be planned, .*; name one of gpipe"):
        config_of("pipeline.schedule=own.csv")


def test_every_plan_is_a_valid_config_with_all_devices():
    plans = [*space()]
    assert len(plans) == len({*plans}) > 100
    given = config_of()
    for plan in plans:
        config = plan.applied(given)  # raises if the values do not fit together
        assert math.prod(config.mesh.sizes.values()) == 8
        size = plan.microbatch_size(config.data.global_batch_size)
        assert size * plan.num_microbatches * plan.num_replicas == 16


@pytest.mark.parametrize("remat", ["full", "stage", "stage,mlp"])
def test_fixed_values_are_the_same_in_every_plan(remat):
    overrides = ("train.num_microbatches=4", "memory.zero_stage=1", "pipeline.schedule=1f1b")
    plans = [*space(8, *overrides, f"train.remat={remat}")]
    assert plans
    for plan in plans:
        assert (plan.num_microbatches, str(plan.remat), plan.schedule) == (4, remat, "1f1b")
        assert plan.zero_stage == 1


def test_fraction_of_parameters_that_zero_3_splits_allows_no_other_stage():
    overrides = ("memory.zero_stage=3", "memory.shard_parameters_fraction=0.5")
    config = config_of(*overrides)
    plans = [*dataclasses.replace(space(), config=config)]
    assert {plan.zero_stage for plan in plans} == {3}
    for plan in plans:
        assert plan.applied(config).memory.shard_parameters_fraction == 0.5


def test_chunks_divide_the_layers():
    chunks = {(p.mesh.pipeline, p.chunks) for p in space() if p.mesh.pipeline > 1}
    assert chunks == {(2, 1), (2, 2), (4, 1)}


def test_batch_that_the_replicas_do_not_divide_is_not_planned():
    found = {mesh.data for mesh in space(8, "data.global_batch_size=6").meshes()}
    assert found == {1, 2}


def test_fsdp_counts_as_zero_3():
    stages = {plan.effective_zero_stage for plan in space(8, "mesh.fsdp=2")}
    assert stages == {3}
    assert {p.effective_zero_stage for p in space() if p.num_replicas == 1} == {0}


def test_stages_are_cut_by_flops_where_an_even_cut_is_not_balanced():
    cuts = {(each.mesh.pipeline * each.chunks, each.layers_per_stage) for each in space()}
    assert cuts == {(1, ()), (2, ()), (4, ())}
    plans = space(num_layers=6, cuts=lambda n, share_vocab: [() if 6 % n == 0 else ("auto",)])
    uneven = {(each.mesh.pipeline * each.chunks, each.layers_per_stage) for each in plans}
    # 6 layers cannot be divided by 4; into 1 and 2 they can.
    assert uneven == {(1, ()), (2, ()), (4, ("auto",))}
    # A cut that is too uneven is tried only if the user asks for its stages.
    assert {each.mesh.pipeline for each in space(num_layers=5)} == {1, 2, 4}
    asked = [*space(12, "mesh.pipeline=3", num_layers=4)]
    assert {(each.mesh.pipeline, each.layers_per_stage) for each in asked} == {(3, ("auto",))}


def test_uneven_stages_are_tried_if_there_is_no_other_plan():
    plans = [*space(3, most_model=2)]
    found = {(each.mesh.pipeline, each.mesh.data, each.layers_per_stage) for each in plans}
    assert found == {(3, 1, ("auto",))}  # 3 divides neither 16 examples nor 4 layers
    assert {each.mesh.pipeline for each in space(6, most_model=2)} == {3}
    assert {each.mesh.pipeline for each in space(3, most_model=3)} == {1}


def test_a_fixed_number_of_microbatches_divides_the_batch_of_each_replica():
    plans = [*space(8, "train.num_microbatches=4")]
    assert {plan.num_replicas for plan in plans} == {1, 2, 4}
    assert {plan.microbatch_size(16) * plan.num_replicas for plan in plans} == {4}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["pipeline.schedule=zbv"], {("zbv", 2)}),
        (["pipeline.chunks=2"], {("zbv", 2), ("interleaved_1f1b", 2)}),
        (["pipeline.chunks=1"], {("1f1b", 1), ("zero_bubble", 1)}),
        (["pipeline.chunks=3"], {("interleaved_1f1b", 3)}),
        (["pipeline.schedule=gpipe"], {("gpipe", 1)}),
        (["pipeline.schedule=gpipe", "pipeline.chunks=2"], {("gpipe", 2)}),
        (["pipeline.schedule=interleaved_1f1b"], {("interleaved_1f1b", n) for n in (2, 4)}),
    ],
)
def test_schedules_have_their_numbers_of_chunks(overrides, expected):
    plans = space(
        2, "mesh.pipeline=2", *overrides, num_layers=24, cuts=lambda num_chunks, share_vocab: [()]
    )
    assert {(plan.schedule, plan.chunks) for plan in plans} == expected


def test_models_that_see_the_whole_batch_have_one_microbatch():
    assert {each.num_microbatches for each in space(sees_whole_batch=True)} == {1}


def test_long_sequences_are_divided_over_context():
    def sizes(*overrides: str) -> set[int]:
        return {mesh.context for mesh in space(8, *overrides).meshes()}

    assert sizes("data.sequence_length=8192") == {1}
    assert sizes("data.sequence_length=32768") == {1, 2, 4}  # at least 8,192 tokens a device
    assert sizes("data.sequence_length=131072") == {1, 2, 4, 8}
    assert sizes("mesh.context=2", "data.sequence_length=8192") == {2}


def test_stages_share_the_vocab_if_the_model_allows_it():
    def shared(*overrides: str, can_share_vocab: bool) -> set[tuple[bool, bool]]:
        plans = space(8, *overrides, can_share_vocab=can_share_vocab)
        return {(plan.mesh.pipeline > 1, plan.share_vocab) for plan in plans}

    assert shared(can_share_vocab=False) == {(False, False), (True, False)}
    assert shared(can_share_vocab=True) == {(False, False), (True, False), (True, True)}
    fixed = shared("pipeline.share_vocab=true", can_share_vocab=True)
    assert {value for has_stages, value in fixed if has_stages} == {True}


def test_number_of_microbatches_can_be_limited():
    counts = {plan.num_microbatches for plan in space(max_microbatches=4)}
    assert counts == {1, 2, 4}
    assert max(plan.num_microbatches for plan in space()) == 16


def test_a_search_chooses_what_runs_would_choose():
    fixed = {"mesh.data", "train.remat", "train.unroll"}
    opened, still_fixed = with_open_choices(
        config_of("train.remat=auto", "train.unroll=None"), fixed
    )
    assert still_fixed == {"mesh.data"} and opened.train.remat == "stage,dots"
    config = config_of("train.remat=full", "train.unroll=False")
    assert with_open_choices(config, fixed) == (config, fixed)
