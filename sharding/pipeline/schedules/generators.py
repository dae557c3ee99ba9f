"""The pipeline schedules that a name stands for, each made by a function of three counts.

S stages, M microbatches, V chunks of layers per stage. The tables are made for ticks that last as
long as their slowest stage, which is how the executor runs: in the middle of a step every stage
does the same work in every tick. The tick of an operation is a formula of its microbatch and chunk.

Sources: GPipe, Huang et al. 2019 (arXiv:1811.06965), section 2.3; 1F1B and interleaved 1F1B,
Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; ZB-H1, Qi et al. 2023 (arXiv:2401.10241),
section 2.3; ZB-V, Qi et al. 2024 (arXiv:2405.15362), section 3.
"""

from collections.abc import Sequence

from sharding.pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Key,
    Op,
    Schedule,
    loop_placement,
    v_placement,
)


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Returns all forwards, then all backwards: every activation is held at the turn."""
    S, M, V = num_stages, num_microbatches, num_chunks
    stride = max(M, S)
    turn = (V - 1) * stride + M + S - 1
    when: dict[Key, int] = {}
    for chunk in range(V):
        for stage in range(S):
            for m in range(M):
                virtual = chunk * S + stage
                when[FORWARD, m, virtual] = chunk * stride + m + stage
                when[BACKWARD, m, virtual] = turn + (V - 1 - chunk) * stride + m + S - 1 - stage
    return _from_ticks("gpipe", loop_placement(S, V), S, when)


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Returns every backward as early as it can be: what is held does not grow with M.

    A tick of the middle holds a forward and a backward. The step takes (M+S-1)(F+B).
    """
    _require_chunks("1f1b", num_chunks, 1, "choose interleaved_1f1b for more chunks")
    return _one_f_one_b("1f1b", num_stages, num_microbatches, 1)


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Returns 1F1B over several chunks per stage: the bubble shrinks to that of a chunk.

    Microbatches go through the chunks in groups of S to 2S-1. The step takes (VM+S-1)(F+B)/V for
    M ≥ S, and (M+VS-1)(F+B)/V for M ≤ S; V=1 is 1F1B.
    """
    return _one_f_one_b("interleaved_1f1b", num_stages, num_microbatches, num_chunks)


def zero_bubble(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Returns 1F1B with weight gradients (W) apart from input gradients (I), to fill the bubble.

    Forwards and input gradients are where 1F1B has forwards and backwards. For M ≥ 2S-2 the step
    takes M(F+I+W) + (S-1)(max(F,W)+max(I,W)-W); with W ≤ F, W ≤ I that is ZB-H1's time, in
    synchronous ticks too.
    """
    _require_chunks("zero_bubble", num_chunks, 1, "choose zbv, or interleaved_1f1b")
    S, M = num_stages, num_microbatches
    turn = 2 * (S - 1)
    when: dict[Key, int] = {}
    for stage in range(S):
        for m in range(M):
            when[FORWARD, m, stage] = m + stage
            when[INPUT_GRADIENT, m, stage] = m + turn - stage
    return _with_weight_gradients(
        _from_ticks("zero_bubble", loop_placement(S, 1), S, when),
        full=range(turn, M),
        limit=2 * S - 1,
    )


def zbv(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Returns zero-bubble over two chunks per stage, placed down and up again like a V.

    The first stage has both ends of the model, so it turns to the backward after 2S chunks, and
    stages alternate between their chunks. A stage whose second chunk has nothing to do yet runs
    up to S/2 forwards of the first one ahead. With F=I=W and M ≥ 2S a step that runs freely takes
    3M + (S-1)/2: nothing but the first forward's way to the last stage is lost.
    """
    _require_chunks("zbv", num_chunks, 2, "set pipeline.chunks=2")
    S, M = num_stages, num_microbatches
    last = 2 * S - 1
    when: dict[Key, int] = {}
    for virtual in range(2 * S):
        ahead = max(0, min(S // 2, S - 1 - virtual))
        for m in range(M):
            when[FORWARD, m, virtual] = virtual + max(m, 2 * (m - ahead))
            when[INPUT_GRADIENT, m, virtual] = 2 * last - virtual + 2 * m
    return _with_weight_gradients(
        _from_ticks("zbv", v_placement(S), S, when),
        full=range(2 * last, 2 * M - 1),
        limit=2 * last,
    )


def forward_only(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """Returns forwards alone, for evaluation, on any placement.

    Args:
      num_stages: S.
      num_microbatches: M.
      num_chunks: V.
      placement: the stage of each of the V*S virtual stages; a loop if None.
    """
    if placement is None:
        placement = loop_placement(num_stages, num_chunks)
    # Deepest first holds the least; on some counts shallowest first is faster.
    orders = (range(len(placement))[::-1], range(len(placement)))
    tables = [_greedy_forwards(placement, num_microbatches, order) for order in orders]
    when = min(tables, key=lambda when: max(when.values()))
    return _from_ticks("forward_only", placement, num_stages, when)


def _greedy_forwards(placement: Sequence[int], M: int, order: Sequence[int]) -> dict[Key, int]:
    """Returns the ticks of forwards, each as early as its stage is free of those first in order."""
    when: dict[Key, int] = {}
    done = [0] * len(placement)
    tick = 0
    while min(done) < M:
        starts: dict[int, int] = {}
        for virtual in order:
            if done[virtual] < (done[virtual - 1] if virtual else M):
                starts.setdefault(placement[virtual], virtual)
        for virtual in starts.values():
            when[FORWARD, done[virtual], virtual] = tick
            done[virtual] += 1
        tick += 1
    return when


def _one_f_one_b(name: str, S: int, M: int, V: int) -> Schedule:
    """Returns 1F1B of groups of microbatches that go through all chunks one after the other."""
    num_groups = max(1, M // S)
    sizes = [M // num_groups + (group < M % num_groups) for group in range(num_groups)]
    # With fewer microbatches than stages, the next chunk's input arrives only S ticks later.
    strides = [max(size, S) for size in sizes]
    turn = (V - 1) * strides[0] + S - 1
    when: dict[Key, int] = {}
    for group, stride in enumerate(strides):
        for chunk in range(V):
            for i in range(sizes[group]):
                m = sum(sizes[:group]) + i
                first = V * sum(strides[:group]) + i
                for stage in range(S):
                    virtual = chunk * S + stage
                    when[FORWARD, m, virtual] = first + chunk * stride + stage
                    when[BACKWARD, m, virtual] = (
                        turn + first + (V - 1 - chunk) * stride + S - 1 - stage
                    )
    return _from_ticks(name, loop_placement(S, V), S, when)


def _with_weight_gradients(schedule: Schedule, *, full: range, limit: int) -> Schedule:
    """Returns the schedule of F and I with W where it does not lengthen a synchronous tick.

    A tick of `full` has room for F, I and W on every stage. Any other tick in which some stage runs
    both F and I has room for two operations, the rest for one. When all forwards have run, a tick
    of W alone follows each tick that leaves a W behind on the first stage. A stage that would hold
    more than `limit` activations in the next tick runs a W at once.
    """
    waiting: list[list[Op]] = [[] for _ in range(schedule.num_stages)]
    held = [0] * schedule.num_stages
    last_forward = max(tick for key, tick in schedule.when().items() if key[0] == FORWARD)

    def weight_gradient(stage: int) -> tuple[Op, ...]:
        if not waiting[stage]:
            return ()
        held[stage] -= 1
        return (waiting[stage].pop(0)._replace(kind=WEIGHT_GRADIENT),)

    ticks: list[tuple[tuple[Op, ...], ...]] = []
    following = (*schedule.ticks[1:], ((),) * schedule.num_stages)
    for tick, (row, next_row) in enumerate(zip(schedule.ticks, following, strict=True)):
        room = 3 if tick in full else max(map(len, row))
        cells = []
        for stage, cell in enumerate(row):
            waiting[stage] += [op for op in cell if op.kind == INPUT_GRADIENT]
            held[stage] += sum(op.kind == FORWARD for op in cell)
            arriving = sum(op.kind == FORWARD for op in next_row[stage])
            if len(cell) < room or held[stage] + arriving > limit:
                cell = (*cell, *weight_gradient(stage))
            cells.append(cell)
        ticks.append(tuple(cells))
        if tick > last_forward and waiting[0]:
            ticks.append(tuple(weight_gradient(stage) for stage in range(schedule.num_stages)))
    while any(waiting):
        ticks.append(tuple(weight_gradient(stage) for stage in range(schedule.num_stages)))
    return Schedule(
        name=schedule.name,
        num_stages=schedule.num_stages,
        num_chunks=schedule.num_chunks,
        num_microbatches=schedule.num_microbatches,
        placement=schedule.placement,
        ticks=tuple(ticks),
    )


def _from_ticks(
    name: str, placement: Sequence[int], num_stages: int, when: dict[Key, int]
) -> Schedule:
    """Returns the table in which each operation runs in the tick given, F first in its cell."""
    placement = tuple(placement)
    chunk_of = [placement[:virtual].count(stage) for virtual, stage in enumerate(placement)]
    num_ticks = 1 + max(when.values())
    cells: list[list[list[Op]]] = [[[] for _ in range(num_stages)] for _ in range(num_ticks)]
    for (kind, microbatch, virtual), tick in when.items():
        op = Op(kind, microbatch, chunk_of[virtual])
        cell = cells[tick][placement[virtual]]
        cell.insert(0 if kind == FORWARD else len(cell), op)
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_chunks=len(placement) // num_stages,
        num_microbatches=1 + max(microbatch for _, microbatch, _ in when),
        placement=placement,
        ticks=tuple(tuple(tuple(cell) for cell in row) for row in cells),
    )


def _require_chunks(name: str, num_chunks: int, wanted: int, remedy: str) -> None:
    if num_chunks != wanted:
        raise ValueError(
            f"pipeline.schedule={name} has exactly {wanted} chunk{'s' * (wanted > 1)} of layers "
            f"per stage, not pipeline.chunks={num_chunks}; {remedy}"
        )
