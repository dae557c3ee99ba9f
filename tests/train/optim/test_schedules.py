"""Learning-rate schedules against PyTorch, `transformers` and published formulas."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

from tests.train.optim.stacked import BASE
from train.optim.config import OptimizerConfig
from train.optim.schedules import make_learning_rate_schedule


def rate(step: int, num_steps: int = 24, **changes) -> float:
    schedule: Any = make_learning_rate_schedule(dataclasses.replace(BASE, **changes), num_steps)
    return float(schedule(step))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warmup_rises_linearly_to_the_peak(schedule):
    # float32 has a relative error of about 1e-7.
    rates = [rate(step, schedule=schedule) for step in range(5)]
    np.testing.assert_allclose(rates, [0.005, 0.01, 0.015, 0.02, 0.02], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1])
def test_first_update_uses_the_peak_rate_without_warmup(warmup):
    assert rate(0, warmup_steps=warmup) == pytest.approx(0.02)


@pytest.mark.parametrize(
    "schedule, middle, end",
    [("cosine", 0.011, 0.002), ("linear", 0.011, 0.002), ("constant", 0.02, 0.02)],
)
def test_learning_rate_decays_to_its_final_fraction(schedule, middle, end):
    # The peak is at update 4, the end at update 23, the last of 24: halfway is between 13 and 14.
    around = (rate(13, schedule=schedule) + rate(14, schedule=schedule)) / 2
    assert around == pytest.approx(middle)
    assert rate(23, schedule=schedule) == pytest.approx(end)
    assert rate(1000, schedule=schedule) == pytest.approx(end)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rate_of_a_compiled_step_is_never_negative(schedule):
    """A compiler may multiply by the reciprocal of the number of steps, which is rounded."""
    config = dataclasses.replace(BASE, schedule=schedule, final_learning_rate_fraction=0.0)
    counts = range(10, 60)

    @jax.jit
    def lowest_rates():
        schedules = [(make_learning_rate_schedule(config, count), count) for count in counts]
        return [jnp.min(jax.vmap(rate)(jnp.arange(count))) for rate, count in schedules]

    assert min(map(float, lowest_rates())) >= 0


@pytest.mark.parametrize(
    "shape, middle", [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)]
)
def test_wsd_is_stable_and_then_decays(shape, middle):
    wsd = {"schedule": "wsd", "decay_steps": 8, "decay_shape": shape}
    assert [rate(step, **wsd) for step in (3, 9, 15)] == pytest.approx([0.02] * 3)
    assert rate(16, **wsd) < 0.02
    assert rate(19, **wsd) == pytest.approx(0.002 + 0.018 * middle)
    assert rate(23, **wsd) == pytest.approx(0.002)
    # A stable checkpoint resumes in a run of another length.
    assert rate(23, num_steps=40, **wsd) == rate(31, num_steps=40, **wsd) == pytest.approx(0.02)
    assert rate(39, num_steps=40, **wsd) == pytest.approx(0.002)


def test_inverse_sqrt_equals_transformers():
    parameter = torch.nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([parameter], lr=0.02)
    scheduler = transformers.get_inverse_sqrt_schedule(reference, num_warmup_steps=4)
    rates = []
    for _ in range(20):
        reference.step()
        scheduler.step()  # its warmup starts at 0
        rates.append(scheduler.get_last_lr()[0])
    assert [rate(n, schedule="inverse_sqrt") for n in range(20)] == pytest.approx(rates, rel=1e-6)


TORCH_SCHEDULES = {
    "polynomial": (
        {"schedule": "polynomial", "decay_power": 2.0, "final_learning_rate_fraction": 0.0},
        lambda o: torch.optim.lr_scheduler.PolynomialLR(o, total_iters=23, power=2.0),
    ),
    "piecewise": (
        {"schedule": "piecewise", "milestones": (5, 9), "milestone_factor": 0.5},
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [5, 9], gamma=0.5),
    ),
    "cosine_restarts": (
        {"schedule": "cosine_restarts", "cycle_steps": 5},
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=0.002),
    ),
    "longer cycles": (
        {"schedule": "cosine_restarts", "cycle_steps": 3, "cycle_factor": 2},
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2, eta_min=0.002),
    ),
}


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_schedule_equals_pytorchs(name):
    settings, make = TORCH_SCHEDULES[name]
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    scheduler = make(reference)
    rates = []
    for _ in range(24):
        rates.append(scheduler.get_last_lr()[0])
        reference.step()
        scheduler.step()
    ours = [rate(step, warmup_steps=0, **settings) for step in range(24)]
    assert ours == pytest.approx(rates, rel=1e-5, abs=1e-9)  # float32


def test_milestones_count_from_the_start_of_the_run():
    settings = {"schedule": "piecewise", "milestones": (2, 8)}
    rates = [rate(step, **settings) for step in (1, 2, 3, 4, 7, 8)]
    assert rates == pytest.approx([0.01, 0.0015, 0.002, 0.002, 0.002, 0.0002])


def test_wsd_may_decay_while_the_rate_still_rises():
    wsd = {"schedule": "wsd", "decay_steps": 22, "decay_shape": "linear"}
    rates = [rate(step, final_learning_rate_fraction=0.0, **wsd) for step in range(24)]
    expected = [0.02 * min((n + 1) / 4, 1) * min((23 - n) / 22, 1) for n in range(24)]
    assert rates == pytest.approx(expected, abs=1e-8)


def thirds(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    return optax.piecewise_constant_schedule(config.learning_rate, {num_steps // 3: 0.5})


def no_schedule(config: OptimizerConfig, num_steps: int) -> float:
    return config.learning_rate


def test_schedule_of_an_import_path_gets_the_config_and_the_length():
    name = f"{__name__}:thirds"
    assert [rate(step, schedule=name) for step in (0, 7, 8)] == pytest.approx([0.02, 0.02, 0.01])
    with pytest.raises(ValueError, match="returned 0.02, but must return a function"):
        rate(0, schedule=f"{__name__}:no_schedule")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"schedule": "wsd"}, "wsd needs optimizer.decay_steps, which is 0; set it"),
        ({"schedule": "cosine_restarts"}, "needs optimizer.cycle_steps"),
        ({"schedule": "piecewise"}, "needs optimizer.milestones"),
        (
            {"milestones": (9, 8)},
            r"milestones=\(9, 8\) must be positive .* in ascending order",
        ),
        ({"name": "schedule_free", "beta1": 0.0}, "needs optimizer.beta1 above 0"),
    ],
)
def test_schedule_that_cannot_be_made_is_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        rate(0, **settings)


def test_warmup_may_be_longer_than_the_run():
    assert rate(2, num_steps=3) == pytest.approx(0.015)


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"warmup_steps": 25}, "optimizer.warmup_steps=25 takes all of train.num_steps=24, so the"),
        ({"warmup_steps": 24}, "optimizer.warmup_steps=24 takes all of train.num_steps=24, so the"),
        ({"warmup_steps": 23}, None),
        ({"warmup_steps": 25, "schedule": f"{__name__}:thirds"}, None),
        (
            {"schedule": "wsd", "decay_steps": 21},
            "optimizer.warmup_steps=4 and optimizer.decay_steps=21 overlap in train.num_steps=24",
        ),
        ({"schedule": "wsd", "decay_steps": 20}, None),
        ({"schedule": "cosine_restarts", "cycle_steps": 21}, "optimizer.cycle_steps=21 after opt"),
        ({"schedule": "cosine_restarts", "cycle_steps": 20}, None),
        (
            {"schedule": "piecewise", "milestones": (8, 24)},
            "optimizer.milestones=(8, 24): train.num_steps=24 ends before 24; choose earlier",
        ),
        ({"schedule": "piecewise", "milestones": (8, 23)}, None),
    ],
)
def test_warning_names_the_part_of_a_schedule_that_the_run_lacks(settings, start):
    config = dataclasses.replace(BASE, **settings)
    warnings = config.length_warnings(24)
    assert len(warnings) == (start is not None)
    assert all(warning.startswith(start) for warning in warnings)
    if settings.get("schedule") == "wsd":
        rates = [rate(step, **settings) for step in range(24)]
        assert bool(warnings) == (max(rates) < 0.02 * (1 - 1e-6))
