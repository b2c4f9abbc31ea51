"""Schedules that part backwards: golden grids, torch's own classes, closed forms of papers, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.action import format_order, parse_order
from mm_autoparallel.pipeline.schedules.catalog import OF_MICROBATCHES, SCHEDULES, check_rounds, find_schedule
from mm_autoparallel.pipeline.schedules.orders import find_deadlock, read_orders
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import Timeline, simulate

PARTED = sorted(name for name, s in SCHEDULES.items() if s.splits and s.given_by == "rule")

GOLDEN = {
    ("zb_h1", 3, 1, 4, 0): "0F0 1F0 2F0 0I0 0W0 3F0 1I0 1W0 2I0 2W0 3I0 3W0",
    ("zb_h1", 3, 1, 4, 2): "0F0 0I0 1F0 1I0 2F0 2I0 0W0 3F0 3I0 1W0 2W0 3W0",
    ("zb_h2", 3, 1, 6, 1): "0F0 1F0 2F0 0I0 3F0 1I0 4F0 2I0 0W0 5F0 3I0 1W0 4I0 2W0 5I0 3W0 4W0 5W0",
    ("interleaved_zb", 2, 2, 2, 1): "0F0 1F0 0F1 0I1 1F1 1I1 0W1 0I0 1W1 1I0 0W0 1W0",
    ("zbv", 2, 2, 2, 1): "0F0 0F1 1F0 1F1 0I1 0W1 0I0 0W0 1I1 1W1 1I0 1W0",
    ("v_min", 2, 2, 2, 0): "0F0 0F1 0I1 0W1 1F0 0I0 0W0 1F1 1I1 1W1 1I0 1W0",
    ("v_half", 2, 2, 2, 1): "0F0 0F1 1F0 1F1 0I1 0W1 0I0 0W0 1I1 1W1 1I0 1W0",
    ("dualpipev", 2, 2, 4, 0): "0F0 1F0 2F0 0F1 0I1 0W1 1F1 (3F0;1B1) (2F1;0B0) 2B1 (3F1;1B0) 3B1 2I0 2W0 3I0 3W0",
    ("dualpipev", 2, 2, 4, 1): "0F0 0F1 1F0 1F1 2F0 0B1 (2F1;0B0) (3F0;1B1) (3F1;1B0) 2B1 2B0 3I1 3I0 3W1 3W0",
    ("dualpipev_whole", 2, 2, 4, 0): "0F0 1F0 2F0 0F1 0I1 0W1 1F1 (3F0;1B1) (2F1;0B0) 2B1 (3F1;1B0) 3B1 2B0 3B0",
    ("dualpipev_whole", 2, 2, 4, 1): "0F0 0F1 1F0 1F1 2F0 0B1 (2F1;0B0) (3F0;1B1) (3F1;1B0) 2B1 2B0 3B1 3B0",
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_grid(case: tuple[str, int, int, int, int]) -> None:
    name, *shape = case
    order = SCHEDULES[name].order(*shape)
    assert format_order(order) == GOLDEN[case]
    assert parse_order(GOLDEN[case]).tolist() == order.tolist()


@given(st.sampled_from(PARTED), st.integers(1, 9), st.integers(1, 4), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_every_action_once_in_its_turn_and_no_deadlock(
    name: str, num_stages: int, num_chunks: int, num_microbatches: int
) -> None:
    schedule = SCHEDULES[name]
    num_chunks = 2 if schedule.v_shaped else num_chunks if schedule.interleaved else 1
    num_microbatches += schedule.least_rounds * num_stages
    shape = (num_stages, num_chunks, num_microbatches)
    texts = [format_order(schedule.order(*shape, stage)) for stage in range(num_stages)]
    orders = read_orders(texts, *shape)
    assert find_deadlock(orders, num_chunks, schedule.v_shaped) == ""
    graph = full_graph(name, *shape)
    assert graph.num_tasks == sum(len(order) for order in orders)


def torch_order(name: str, num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> list[str]:
    """The words of torch's class for one rank, as this package writes them."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = {
        "interleaved_zb": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
    }[name]
    if not hasattr(schedules, theirs):
        pytest.skip(f"this torch has no {theirs}")
    kind = getattr(schedules, theirs)
    one = object.__new__(kind)  # its __init__ needs live stages and a process group
    one.pp_group_size, one._num_stages, one.num_stages = num_stages, num_stages * num_chunks, num_stages * num_chunks
    one._n_microbatches, one.n_local_stages = num_microbatches, num_chunks
    one.number_of_rounds = max(1, num_microbatches // num_stages)
    one.microbatches_per_round = num_microbatches // one.number_of_rounds
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

    def word(action: object) -> str:
        chunk = action.stage_index // num_stages  # type: ignore[attr-defined]
        letter = letters[action.computation_type.name]  # type: ignore[attr-defined]
        return f"{action.microbatch_index}{letter}{chunk}"  # type: ignore[attr-defined]

    words = []
    for action in kind._calculate_single_rank_operations(one, stage):
        if action is None:
            continue
        parts = getattr(action, "sub_actions", None)
        words.append(f"({';'.join(map(word, parts))})" if parts else word(action))
    return words


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [("interleaved_zb", 1), ("interleaved_zb", 2), ("interleaved_zb", 3), ("zbv", 2), ("dualpipev", 2)],
)
def test_orders_are_those_of_torch(name: str, num_chunks: int, num_stages: int) -> None:
    for num_microbatches in (1, 3, num_stages, 2 * num_stages, 2 * num_stages + 1, 3 * num_stages, 5 * num_stages):
        if name == "dualpipev" and num_microbatches < 2 * num_stages:
            continue
        if name == "interleaved_zb" and num_microbatches % max(1, num_microbatches // num_stages):
            continue  # torch refuses it
        for stage in range(num_stages):
            mine = format_order(SCHEDULES[name].order(num_stages, num_chunks, num_microbatches, stage))
            assert mine.split() == torch_order(name, num_stages, num_chunks, num_microbatches, stage)


def uniform(
    name: str, num_stages: int, num_microbatches: int, forward: float, input_: float, weight: float, pair: float = 0.0
) -> Timeline:
    """Equal chunks without transfers; pair: what a forward and a backward take together, 0 where none run so."""
    num_chunks = 2 if SCHEDULES[name].interleaved else 1
    num_virtual, backward = num_stages * num_chunks, input_ + weight
    overlap = (forward + backward - pair) / min(forward, backward) if pair else 0.0
    block = ChainBlock("layer", "text", num_virtual, forward, backward, 0.0, 1.0, backward_weight_ms=weight)
    none, hops = (0.0,) * num_stages, (0.0,) * (num_virtual - 1)
    problem = Problem(
        num_stages, num_chunks, num_microbatches, name, (block,), (1e9,) * num_stages, none, none, hops, hops
    )
    one_each = Placement(((1,),) * num_virtual, (((),),) * num_virtual)
    return simulate(replace(problem, pair_overlap_fraction=overlap), one_each)


def mindspeed_order(num_stages: int, num_microbatches: int, stage: int, parts_last: bool) -> str:
    """From the counts of its phases, as MindSpeed's generate_dualpipev_schedule and what runs them say it."""
    done = {"F": [0, 0], "B": [0, 0]}
    words: list[str] = []
    waiting: list[str] = []

    def word(kind: str, chunk: int, parted: bool = False) -> str:
        number = done[kind][chunk]
        done[kind][chunk] += 1
        if parted:
            waiting.append(f"{number}W{chunk}")
        return f"{number}{'I' if parted else kind}{chunk}"

    later = num_stages - stage - 1
    words += [word("F", 0) for _ in range(2 * later)]
    words += [word("F", chunk) for _ in range(stage + 1) for chunk in (0, 1)]
    for _ in range(later):
        words += [word("B", 1, True), waiting.pop(), word("F", 1)]
    forward, alone = 0, later == 0
    for _ in range(2 * num_microbatches - 4 * num_stages + 2 * stage + 2 + 2 * later + stage + 1):
        pair = [word("F", forward)] if done["F"][forward] < num_microbatches else []
        pair.append(word("B", 1 - forward))
        words += pair if alone or len(pair) == 1 else [f"({';'.join(pair)})"]
        forward, alone = 1 - forward, False
    left, chunk = [num_microbatches - count for count in done["B"]], 1 - forward
    for index in range(num_stages):
        chunk = chunk if left[chunk] else 1 - chunk
        words.append(word("B", chunk, parts_last))
        left[chunk], chunk = left[chunk] - 1, 1 - chunk
        words += [waiting.pop(0)] if waiting and index >= stage else []
    return " ".join([*words, *waiting])


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("name", "parts_last"), [("dualpipev", True), ("dualpipev_whole", False)])
def test_dualpipev_is_that_of_mindspeed(name: str, parts_last: bool, num_stages: int) -> None:
    for num_microbatches in (2 * num_stages, 2 * num_stages + 1, 5 * num_stages):
        for stage in range(num_stages):
            mine = format_order(SCHEDULES[name].order(num_stages, 2, num_microbatches, stage))
            assert mine == mindspeed_order(num_stages, num_microbatches, stage, parts_last)


def test_whole_last_backwards_free_activations_sooner_and_take_longer() -> None:
    parted, whole = (uniform(name, 4, 12, 1.0, 1.0, 1.0) for name in ("dualpipev", "dualpipev_whole"))
    assert whole.step_ms > parted.step_ms
    assert whole.peak_memory_bytes.max() <= parted.peak_memory_bytes.max()


COSTS = [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (3.0, 4.0, 2.0), (1.0, 1.5, 0.5)]


@pytest.mark.parametrize(("f", "i", "w"), COSTS)
@pytest.mark.parametrize("num_stages", [2, 4, 7])
def test_bubbles_are_those_of_the_papers(num_stages: int, f: float, i: float, w: float) -> None:
    """Qi et al. 2023, table 2: 1F1B (p - 1)(F + I + W), ZB-H1 (p - 1)(F + I - W), ZB-H2 (p - 1)(F + I - 2 W)."""
    num_microbatches = 5 * num_stages
    for name, bubble in (("1f1b", f + i + w), ("zb_h1", f + i - w), ("zb_h2", f + i - 2 * w)):
        span = uniform(name, num_stages, num_microbatches, f, i, w).span_ms
        assert span - num_microbatches * (f + i + w) == pytest.approx((num_stages - 1) * bubble)


@pytest.mark.parametrize(("num_stages", "num_microbatches", "step"), [(4, 8, 51.0), (8, 16, 103.0), (3, 20, 122.0)])
def test_zbv_is_never_idle_within_its_span(num_stages: int, num_microbatches: int, step: float) -> None:
    timeline = uniform("zbv", num_stages, num_microbatches, 1.0, 1.0, 1.0)
    assert timeline.span_ms == 6.0 * num_microbatches
    assert timeline.step_ms == 6.0 * num_microbatches + num_stages - 1 == step
    assert timeline.peak_memory_bytes.tolist() == [2.0 * num_stages] * num_stages


def end_of_steps(name: str, num_stages: int, num_microbatches: int, costs: dict[str, float], num_steps: int) -> float:
    """When the last stage is done, where each begins its next step at once: by a plain loop over the words."""
    v_shaped, num_chunks = SCHEDULES[name].v_shaped, 2 if SCHEDULES[name].interleaved else 1
    words = [
        format_order(SCHEDULES[name].order(num_stages, num_chunks, num_microbatches, s)) for s in range(num_stages)
    ]
    ends: dict[tuple[int, str, int, int], float] = {}
    queues = [[(step, *one) for step in range(num_steps) for one in map(parts_of, text.split())] for text in words]
    free = [0.0] * num_stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                step, kind, batch, chunk = queue[0]
                is_back = v_shaped and chunk == 1
                here = chunk * num_stages + (num_stages - 1 - stage if is_back else stage)
                before = [("F", here - 1)] if kind == "F" else [("F", here), ("I", here + 1), ("B", here + 1)]
                before = [("I", here)] if kind == "W" else before
                known = [ends.get((step, k, batch, v)) for k, v in before if 0 <= v < num_stages * num_chunks]
                if kind in "IB" and here + 1 < num_stages * num_chunks:
                    known = [known[0], max((one for one in known[1:] if one is not None), default=None)]
                if any(one is None for one in known):
                    break
                free[stage] = ends[step, kind, batch, here] = max([free[stage], *known]) + costs[kind]
                queue.pop(0)
    return max(free)


def parts_of(word: str) -> tuple[str, int, int]:
    """`12F1` → ("F", 12, 1)."""
    kind = next(letter for letter in word if letter.isalpha())
    batch, chunk = word.split(kind)
    return kind, int(batch), int(chunk)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_h2", "zbv", "v_half", "interleaved_zb"])
@pytest.mark.parametrize(("f", "i", "w"), COSTS)
def test_steps_follow_each_other_as_fast_as_post_validation_says(name: str, f: float, i: float, w: float) -> None:
    num_stages, num_microbatches = 4, 12
    timeline = uniform(name, num_stages, num_microbatches, f, i, w)
    shape = name, num_stages, num_microbatches, {"F": f, "I": i, "W": w, "B": i + w}
    assert end_of_steps(*shape, 1) == pytest.approx(timeline.step_ms)
    apart_ms = (end_of_steps(*shape, 40) - end_of_steps(*shape, 20)) / 20
    assert timeline.busy_ms.max() - 1e-9 <= apart_ms <= timeline.post_validated_ms + 1e-9
    if name in ("zb_h2", "zbv") and f == i == w:
        assert apart_ms == pytest.approx(timeline.post_validated_ms)
        assert timeline.post_validated_ms < timeline.step_ms


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "costs", "pair", "idle"),
    [
        (4, 10, (1.0, 1.0, 1.0), 3.0, 6.0),
        (4, 10, (1.0, 1.0, 1.0), 2.5, 4.5),
        (4, 10, (2.0, 2.0, 1.0), 4.0, 12.0),
        (8, 20, (1.0, 1.0, 1.0), 3.0, 14.0),
    ],
)
def test_the_last_stage_of_dualpipev_is_idle_as_deepseek_says(
    num_stages: int, num_microbatches: int, costs: tuple[float, float, float], pair: float, idle: float
) -> None:
    """(PP/2 - 1)(F&B + B - 3 W), github.com/deepseek-ai/DualPipe, where PP counts the stages of both directions."""
    timeline = uniform("dualpipev", num_stages, num_microbatches, *costs, pair)
    _, i, w = costs
    assert (num_stages - 1) * (pair + i + w - 3 * w) == idle
    assert timeline.step_ms - timeline.busy_ms[-1] == pytest.approx(idle)
    assert timeline.peak_memory_bytes.max() == 2 * num_stages + 1


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6, 8, 9])
def test_v_blocks_hold_half_and_a_third_of_1f1b(num_stages: int) -> None:
    """Qi et al. 2024, table 1, to a few chunks; a chunk is half of what 1F1B holds of a micro-batch."""
    of_1f1b = 2 * num_stages
    half = uniform("v_half", num_stages, 30, 1.0, 1.0, 1.0)
    third = uniform("v_min", num_stages, 30, 1.0, 1.0, 1.0)
    assert half.peak_memory_bytes.max() <= of_1f1b / 2 + 2
    assert third.peak_memory_bytes.max() <= of_1f1b / 3 + 3
    for timeline in (half, third):
        assert timeline.step_ms <= 6.0 * 30 + 4 * num_stages


def test_laws_of_v_shaped_schedules() -> None:
    with pytest.raises(JobError, match=r"zbv is V-shaped.* num_chunks is 1"):
        find_schedule("zbv")
    with pytest.raises(JobError, match="num_chunks is 3"):
        find_schedule("dualpipev", 3)
    with pytest.raises(JobError, match="dualpipev on 4 stages needs 8 micro-batches or more"):
        check_rounds(find_schedule("dualpipev", 2), 4, 7)
    with pytest.raises(JobError, match="needs 8 micro-batches"):
        full_graph("dualpipev", 4, 2, 7)
    assert not set(PARTED) & set(OF_MICROBATCHES)


def test_virtual_stages_of_a_v_lie_where_they_turn() -> None:
    graph = full_graph("zbv", 3, 2, 2)
    assert graph.stage_of == (0, 1, 2, 2, 1, 0)
    assert not {2, 5 + 2} & set(graph.hop.tolist())  # between virtual stages 2 and 3, there and back
    assert set(graph.hop.tolist()) == {0, 1, 3, 4, 5, 6, 8, 9, 10}
