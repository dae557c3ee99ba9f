"""Generates the built-in pipeline schedules from the numbers of stages, microbatches and chunks.

S stages, M microbatches, V chunks of layers per stage. The tables are designed for synchronous
ticks, which last as long as their slowest stage, because that is how the executor runs them: in
steady state, every stage does the same work in every tick. The tick of an operation is a closed
formula of its microbatch, stage and chunk. For 1F1B with one chunk:

    forward of microbatch m on stage s    tick m + s
    backward of microbatch m on stage s   tick m + 2 (S - 1) - s

    tick    0  1  2    3    4    5    6  7        S = 3, M = 4
    stage 0 F0 F1 F2   F3   B0   B1   B2 B3
    stage 1 .  F0 F1   F2B0 F3B1 B2   B3 .
    stage 2 .  .  F0B0 F1B1 F2B2 F3B3 .  .

Sources: GPipe, Huang et al. 2019 (arXiv:1811.06965), section 2.3; 1F1B and interleaved 1F1B,
Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; ZB-H1, Qi et al. 2023 (arXiv:2401.10241),
section 2.3; ZB-V, Qi et al. 2024 (arXiv:2405.15362), section 3.
"""

from collections.abc import Sequence

from pipeline.schedules.table import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Key,
    Op,
    Schedule,
    chunk_indices,
    loop_placement,
    v_placement,
)


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards: every activation is in flight at the turning point."""
    S = num_stages
    M = num_microbatches
    V = num_chunks
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
    """1F1B: every backward as early as possible, so activations in flight do not grow with M.

    A steady-state tick contains one forward and one backward. The step takes (M+S-1)(F+B).
    """
    _require_chunks("1f1b", num_chunks, 1, "choose interleaved_1f1b for more chunks")
    return _one_f_one_b("1f1b", num_stages, num_microbatches, 1)


def interleaved_1f1b(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B with several chunks per stage, so the pipeline fills in a chunk's time per stage.

    Microbatches pass through the chunks in groups of S to 2S-1. The step takes (VM+S-1)(F+B)/V for
    M ≥ S, and (M+VS-1)(F+B)/V for M ≤ S; V=1 is 1F1B.
    """
    return _one_f_one_b("interleaved_1f1b", num_stages, num_microbatches, num_chunks)


def zero_bubble(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """1F1B with weight gradients (W) split from input gradients (I), to fill the bubble.

    Forwards and input gradients run in the ticks in which 1F1B runs forwards and backwards. For M ≥
    2S-2 the step takes M(F+I+W) + (S-1)(max(F,W)+max(I,W)-W). If W ≤ F and W ≤ I, this equals the
    time of ZB-H1, also with synchronous ticks.
    """
    _require_chunks("zero_bubble", num_chunks, 1, "choose zbv, or interleaved_1f1b")
    S = num_stages
    M = num_microbatches
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
    """Zero bubble with two chunks per stage, placed down and back up the stages like a V.

    Virtual stages 0 .. S-1 run on stages 0 .. S-1, and S .. 2S-1 on stages S-1 .. 0. So the first
    stage holds both ends of the model, and a microbatch turns to its backward there, after 2S
    chunks. Stages alternate between their two chunks. While a stage's second chunk has no input
    yet, the stage runs up to S/2 forwards of its first chunk ahead. With F=I=W and M ≥ 2S a
    free-running step takes 3M + (S-1)/2: only the time in which the first forward reaches the last
    stage is lost.
    """
    _require_chunks("zbv", num_chunks, 2, "set pipeline.chunks=2")
    S = num_stages
    M = num_microbatches
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
    """Forwards without backwards, for evaluation, on any placement.

    Args:
        num_stages: number of stages, S.
        num_microbatches: number of microbatches, M.
        num_chunks: number of chunks per stage, V.
        placement: stage of each of the V*S virtual stages; `loop_placement` if None.
    """
    if placement is None:
        placement = loop_placement(num_stages, num_chunks)
    # Running the deepest virtual stage first keeps the fewest activations in flight and wins ties;
    # for some counts running the shallowest first takes fewer ticks.
    orders = (range(len(placement))[::-1], range(len(placement)))
    tables = [_greedy_forwards(placement, num_microbatches, order) for order in orders]
    when = min(tables, key=lambda when: max(when.values()))
    return _from_ticks("forward_only", placement, num_stages, when)


def _greedy_forwards(placement: Sequence[int], M: int, order: Sequence[int]) -> dict[Key, int]:
    """Schedule forwards greedily: in each tick a stage runs the first one in `order` that is ready.

    Returns:
        (FORWARD, microbatch, virtual stage) -> tick.
    """
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
    """Build 1F1B over groups of microbatches, each of which passes through all chunks in turn.

    For S = 2, V = 2 and M = 4 there are two groups of 2 microbatches. Stage 0 runs its forwards in
    this order (a and b are its chunks): F0a F1a, F0b F1b, then the second group: F2a F3a, F2b F3b.
    """
    num_groups = max(1, M // S)
    sizes = [M // num_groups + (group < M % num_groups) for group in range(num_groups)]
    # Ticks between a microbatch's forwards through consecutive chunks of one stage. It is at least
    # S, because the microbatch passes through all S stages before it is back.
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
    """Add weight gradients (W) to a schedule of F and I where they do not lengthen a tick.

    A tick in `full` has room for F, I and W on every stage. Any other tick has room for two
    operations per stage if some stage runs both F and I in it, and for one otherwise. Once all
    forwards have run, each tick that leaves a pending W on the first stage is followed by a tick of
    W only. A stage that would hold more than `limit` activations in the next tick runs a W at once.

    Args:
        schedule: table of F and I.
        full: ticks in which every stage may run F, I and W.
        limit: largest number of chunk activations that a stage may hold.
    """
    waiting: list[list[Op]] = [[] for _ in range(schedule.num_stages)]  # I done, W pending
    in_flight = [0] * schedule.num_stages  # activations in flight, per stage
    last_forward = max(tick for key, tick in schedule.when().items() if key[0] == FORWARD)

    def weight_gradient(stage: int) -> tuple[Op, ...]:
        if not waiting[stage]:
            return ()
        in_flight[stage] -= 1
        return (waiting[stage].pop(0)._replace(kind=WEIGHT_GRADIENT),)

    ticks: list[tuple[tuple[Op, ...], ...]] = []
    following = (*schedule.ticks[1:], ((),) * schedule.num_stages)
    for tick, (row, next_row) in enumerate(zip(schedule.ticks, following, strict=True)):
        room = 3 if tick in full else max(map(len, row))
        cells = []
        for stage, cell in enumerate(row):
            waiting[stage] += [op for op in cell if op.kind == INPUT_GRADIENT]
            in_flight[stage] += sum(op.kind == FORWARD for op in cell)
            arriving = sum(op.kind == FORWARD for op in next_row[stage])
            if len(cell) < room or in_flight[stage] + arriving > limit:
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
    """Build the table in which each operation runs in its given tick, F first in its cell."""
    placement = tuple(placement)
    chunk_of = chunk_indices(placement)
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
