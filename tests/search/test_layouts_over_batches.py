"""Plans with a layout under drawn batches: each kind by longest paths of another hand, and never below the step with
expected durations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from two_modules import PHASES, apart, make_job, shared

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.sample_source import SampleSource
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.planner.drawn_batches import DrawnBatches, draw_batches
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.plan import Plan, parse_plan
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_entries
from mm_autoparallel.samples.draw import draw_table, lognormal, mixture

Floats = NDArray[np.float64]
BATCHES = 20


def sampled(freeze: bool = False, hears: bool = False, **search: object) -> Job:
    """The job of `two_modules`, 24 samples a step, small and large images, sounds and texts of many lengths."""
    objective = search.pop("objective", None)
    job = make_job(freeze=freeze, hears=hears, **search)
    images, text = lognormal(1.0, 0.7), lognormal(768.0, 1.0)
    quantities = {"images": images, "patches": mixture((256.0, 1792.0)), "text_tokens": text}
    quantities |= {"audios": lognormal(1.0, 0.5), "audio_seconds": lognormal(5.0, 1.0)} if hears else {}
    source = SampleSource.model_validate({"text_tokens": 768, "batches": BATCHES})
    workload = job.workload.model_copy(update={"samples": source})
    limits = job.search.model_copy(update={"objective": objective})
    return replace(job, workload=workload, search=limits, samples=draw_table(quantities, seed=5, count=500))


def estimate_of(strategy: Strategy, freeze: bool = False) -> Estimate:
    """Its best plan for mean samples, evaluated."""
    of = strategy.arrangement
    job = sampled(freeze, of is not None and len(of.encoder.parts) > 1)
    if of is not None and of.is_cached:
        job = replace(job, workload=job.workload.model_copy(update={"cached_features": ("vision",)}))
    problem = build_problem(CostModel(job), strategy)
    found = place(problem)
    assert found.placement is not None
    return evaluate(job, plan_from_placement(problem, found.placement, strategy, 24))


def joint(one: Arrangement) -> Arrangement:
    """The same of two encoders that are one module."""
    return replace(one, encoder=replace(one.encoder, name="vision+audio"))


KINDS = {
    "apart, two decoders share": (Strategy(3, 1, 2, 2, arrangement=apart(1, 4, 1, 4)), False),
    "apart, two stages": (Strategy(4, 2, 1, 2, arrangement=apart(2, 1, 2, 1)), False),
    "apart, four encoders share": (Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 4, 1)), False),
    "inline, encoders share": (Strategy(1, 4, 2, 4, arrangement=shared("inline", 1, 8, 1)), False),
    "inline, decoders share": (Strategy(1, 1, 8, 1, arrangement=shared("inline", 4, 2, 4)), False),
    "phases": (Strategy(2, 2, 2, 1, arrangement=shared("phases", 1, 8, 3)), False),
    "recomputed phases": (Strategy(2, 1, 4, 2, arrangement=shared("recomputed_phases", 4, 2, 3)), False),
    "bubbles": (Strategy(2, 2, 2, 1, arrangement=shared("bubbles", 1, 8, 1)), False),
    "prefetch": (Strategy(2, 2, 2, 1, arrangement=shared("prefetch", 1, 8, 1)), True),
    "joint apart": (Strategy(3, 1, 2, 2, arrangement=joint(apart(1, 4, 1, 4))), False),
    "joint inline": (Strategy(1, 4, 2, 4, arrangement=joint(shared("inline", 1, 8, 1))), False),
    "joint phases": (Strategy(2, 2, 2, 1, arrangement=joint(shared("phases", 1, 8, 3))), False),
    "joint bubbles": (Strategy(2, 2, 2, 1, arrangement=joint(shared("bubbles", 1, 8, 1))), False),
    "joint prefetch": (Strategy(2, 2, 2, 1, arrangement=joint(shared("prefetch", 1, 8, 1))), True),
    "cached": (Strategy(2, 2, 2, 1, arrangement=shared("cached", 2, 2, 1)), True),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, Estimate]:
    return request.param, estimate_of(*KINDS[request.param])


def test_mean_samples_take_the_step_told(kind: tuple[str, Estimate]) -> None:
    name, estimate = kind
    assert estimate.sampled is not None
    drawn = draw_batches(estimate.sampled)
    of_ones = {name: np.ones(1) for name in drawn.load_factor}
    even = DrawnBatches(of_ones, of_ones, np.zeros((1, 24), dtype=np.int64))
    assert estimate.batch_steps.step_ms(even, 0) == pytest.approx(estimate.step_ms, rel=1e-9), name


def test_no_mean_is_below_the_step_with_expected_durations(kind: tuple[str, Estimate]) -> None:
    over = kind[1].over_batches
    assert over is not None
    assert over.at_mean_ms <= over.mean_ms + 3 * over.error_ms
    assert over.mean_ms <= over.p95_ms <= over.p99_ms


# ------------------------------------------------------------------------------------------------------- another hand


def drawn_of(estimate: Estimate) -> DrawnBatches:
    """What it is played over, where a sample takes as much of either encoder."""
    assert estimate.sampled is not None
    drawn = draw_batches(estimate.sampled)
    same = {"audio": drawn.load_factor["vision"]} if "audio" in drawn.load_factor else {}
    return replace(drawn, load_factor=drawn.load_factor | same, scarcity=lambda _name, mbs: 1.0 + 0.1 / mbs)


class Dealt:
    """One batch of a plan, sample by sample: those of all replicas lie one behind the other, micro-batch by
    micro-batch."""

    def __init__(self, estimate: Estimate, batch: int) -> None:
        drawn, one = drawn_of(estimate), estimate.plan.strategy.arrangement
        assert one is not None
        self.decoder, self.encoder, self.count = (
            estimate.plan.strategy.of_decoder(),
            one.encoder,
            estimate.problem.num_microbatches,
        )
        images, text = drawn.factors("vision", self.encoder.mbs), drawn.factors("text", self.decoder.mbs)
        self.loads = {"vision": images[drawn.batches[batch]], "text": text[drawn.batches[batch]]}
        self.next = images[drawn.batches[(batch + 1) % BATCHES]]

    def text(self, replica: int, m: int) -> float:
        first = (m * self.decoder.dp + replica) * self.decoder.mbs
        return float(np.mean(self.loads["text"][first : first + self.decoder.mbs]))

    def vision(self, replica: int, m: int) -> float:
        first = (m * self.encoder.dp + replica) * self.encoder.mbs
        return float(np.mean(self.loads["vision"][first : first + self.encoder.mbs]))

    def cells(self) -> Iterator[tuple[list[int], list[int]]]:
        """Replicas of the encoder, and of the decoder, that have the same samples."""
        number = min(self.encoder.dp, self.decoder.dp)
        for cell in range(number):
            yield tuple(  # type: ignore[misc]
                [r for r in range(dp) if r * number // dp == cell] for dp in (self.encoder.dp, self.decoder.dp)
            )


def one_f_one_b(stage: int, num_stages: int, count: int) -> list[tuple[str, int]]:
    ahead = min(num_stages - 1 - stage, count)
    word = [("F", m) for m in range(ahead)]
    for m in range(count - ahead):
        word += [("F", ahead + m), ("B", m)]
    return word + [("B", m) for m in range(count - ahead, count)]


Node = tuple[str, int, object]
"""Kind, micro-batch or pass, and where it runs."""


def finish(words: dict[object, list[Node]], needs: dict[Node, list[tuple[Node, float]]], takes: dict[Node, float]):
    """Ends of all nodes, each as soon as what it needs and what is before it in its word have ended."""
    ends: dict[Node, float] = {}
    left, free = {lane: list(word) for lane, word in words.items()}, dict.fromkeys(words, 0.0)
    while any(left.values()):
        for lane, word in left.items():
            while word and all(one in ends for one, _ in needs.get(word[0], [])):
                node = word.pop(0)
                start = max([free[lane], *(ends[one] + hop for one, hop in needs.get(node, []))])
                free[lane] = ends[node] = start + takes[node]
    return ends, free


def check(estimate: Estimate, expected_ms: Callable[[Dealt], float]) -> None:
    for batch in range(BATCHES):
        found_ms = estimate.batch_steps.step_ms(drawn_of(estimate), batch)
        assert found_ms == pytest.approx(expected_ms(Dealt(estimate, batch)), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("apart")])
def test_ranks_of_their_own(name: str) -> None:
    """A node for each pass of each replica on each stage."""
    estimate = estimate_of(*KINDS[name])
    loads, stages = estimate.timeline.loads, estimate.problem.num_stages
    hops, tails = {"F": loads.hop_forward_ms, "B": loads.hop_backward_ms}, loads.tail_ms

    def expected_ms(dealt: Dealt) -> float:
        worst, begun = 0.0, dealt.encoder.pp
        for cell in dealt.cells():
            owners = [cell[s >= begun] for s in range(stages)]
            words, needs, takes = {}, {}, {}
            for s, r in [(stage, replica) for stage in range(stages) for replica in owners[stage]]:
                words[s, r] = [(kind, m, (s, r)) for kind, m in one_f_one_b(s, stages, dealt.count)]
                for kind, m, _ in words[s, r]:
                    load = dealt.vision(r, m) if s < begun else dealt.text(r, m)
                    takes[kind, m, (s, r)] = load * (loads.forward_ms if kind == "F" else loads.backward_ms)[s, 0]
                    near = s - 1 if kind == "F" else s + 1
                    peers = owners[near] if 0 <= near < stages else []
                    peers = [r] if r in peers and (near < begun) == (s < begun) else peers
                    hop = float(hops[kind][min(s, near)]) if peers else 0.0
                    needs[kind, m, (s, r)] = [((kind, m, (near, peer)), hop) for peer in peers]
            _, free = finish(words, needs, takes)
            worst = max(worst, *(end + float(tails[s]) for (s, _), end in free.items()))
        return worst

    check(estimate, expected_ms)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("inline")])
def test_inline_on_one_stage(name: str) -> None:
    estimate = estimate_of(*KINDS[name])
    sums = {
        (name, kind): sum(b.count * getattr(b, f"{kind}_ms") for b in estimate.problem.chain if b.modality == name)
        for name in ("vision", "text")
        for kind in ("forward", "backward")
    }

    def expected_ms(dealt: Dealt) -> float:
        worst = 0.0
        for encoders, decoders in dealt.cells():
            clock = dict.fromkeys(encoders, 0.0)  # who encodes; all meet before and behind the decoder
            for m in range(dealt.count):
                met = max(clock[e] + sums["vision", "forward"] * dealt.vision(e, m) for e in encoders)
                both = sums["text", "forward"] + sums["text", "backward"]
                met += max(both * dealt.text(d, m) for d in decoders)
                clock = {e: met + sums["vision", "backward"] * dealt.vision(e, m) for e in encoders}
            worst = max(worst, *clock.values())
        return worst + float(estimate.timeline.loads.tail_ms[0])

    check(estimate, expected_ms)


@pytest.mark.parametrize("name", ["phases", "recomputed phases"])
def test_phases(name: str) -> None:
    """The step grows by what the busiest encoder replica of a cell takes beyond the mean, and each pipeline by its
    own."""
    strategy, freeze = KINDS[name]
    estimate = estimate_of(strategy, freeze)
    assert estimate.sampled is not None
    own = strategy.of_encoder()
    whole = build_problem(estimate.sampled, own)
    vision = [block for block in whole.chain if block.modality == "vision"]
    again = name == "recomputed phases"
    each = sum(b.count * (b.forward_ms * (1 + again) + b.backward_ms) for b in vision) * whole.time_factors[0]
    loads, stages = estimate.timeline.loads, 2

    def expected_ms(dealt: Dealt) -> float:
        worst, all_of = 0.0, np.arange(24).reshape(-1, dealt.decoder.dp, dealt.decoder.mbs)
        for encoders, decoders in dealt.cells():
            mine = all_of[:, decoders].reshape(-1, own.mbs)  # call by call, one encoder after the other
            takes = [
                sum(float(np.mean(dealt.loads["vision"][call])) for call in mine[turn :: len(encoders)])
                for turn in range(len(encoders))
            ]
            more = max(takes) * each - 24 // (own.dp * own.mbs) * each
            for d in decoders:
                words = {s: [(k, m, s) for k, m in one_f_one_b(s, stages, dealt.count)] for s in range(stages)}
                of = {"F": loads.forward_ms, "B": loads.backward_ms}
                took = {(k, m, s): of[k][s, 0] * dealt.text(d, m) for word in words.values() for k, m, s in word}
                hop = float(loads.hop_forward_ms[0]), float(loads.hop_backward_ms[0])
                needs = {("F", m, 1): [(("F", m, 0), hop[0])] for m in range(dealt.count)}
                needs |= {("B", m, 0): [(("B", m, 1), hop[1])] for m in range(dealt.count)}
                _, free = finish(words, needs, took)
                worst = max(worst, *(free[s] + float(loads.tail_ms[s]) + more for s in range(stages)))
        return worst

    check(estimate, expected_ms)


@pytest.mark.parametrize("name", ["bubbles", "prefetch", "joint bubbles", "joint prefetch"])
def test_beside_the_pipeline(name: str) -> None:
    """By the words of the plan's own order."""
    estimate = estimate_of(*KINDS[name])
    (encoder,) = estimate.problem.encoders
    loads, stages, number = estimate.timeline.loads, 2, encoder.microbatches_per_pass

    def parse(word: str) -> tuple[str, int]:
        kind = "F" if "F" in word else "B"
        return kind, int(word.partition("@")[0].split(kind)[0])

    def expected_ms(dealt: Dealt) -> float:
        worst, width = 0.0, dealt.decoder.tp // dealt.encoder.tp
        images = dealt.next if name.endswith("prefetch") else dealt.loads["vision"]
        for d in range(dealt.decoder.dp):
            words: dict[object, list[Node]] = {}
            needs, takes = {}, {}
            for stage, order in enumerate(estimate.placement.orders):
                words[stage] = []
                for word in order.split():
                    kind, index = parse(word)
                    node = (kind, index, "pass" if "@" in word else stage)
                    words[stage].append(node)
                    if "@" in word:
                        mine = [
                            (m * dealt.decoder.dp + d) * dealt.decoder.mbs + i
                            for m in range(index * number, (index + 1) * number)
                            for i in range(dealt.decoder.mbs)
                        ]
                        slowest = np.mean(images[mine].reshape(width, dealt.encoder.mbs), axis=1).max()
                        takes[node] = float(slowest) * (encoder.forward_ms if kind == "F" else encoder.backward_ms)[0]
                        if kind == "B":
                            ends = [("B", m, 0) for m in range(index * number, (index + 1) * number)]
                            needs[node] = [(end, encoder.feed_ms) for end in ends]
                    else:
                        takes[node] = (
                            dealt.text(d, index) * (loads.forward_ms if kind == "F" else loads.backward_ms)[stage, 0]
                        )
                        if kind == "F":
                            fed = (
                                [(("F", index // number, "pass"), encoder.feed_ms)] if name.endswith("bubbles") else []
                            )
                            needs[node] = [(("F", index, 0), float(loads.hop_forward_ms[0]))] if stage else fed
                        elif stage == 0:
                            needs[node] = [(("B", index, 1), float(loads.hop_backward_ms[0]))]
            _, free = finish(words, needs, takes)
            worst = max(worst, *(free[s] + float(loads.tail_ms[s]) for s in range(stages)))
        return worst

    check(estimate, expected_ms)


# ------------------------------------------------------------------------------------------------------------- search


def test_layouts_are_ranked_by_drawn_batches() -> None:
    job = sampled(layouts="all", objective="mean", mbs=[1, 2], cp=[1], tp=[1, 2], pp=[1, 2])
    found = search(job, 30.0, num_workers=1)
    ranking, best = found.batch_ranking, found.estimates[0]
    assert ranking is not None
    assert best.over_batches is not None
    assert ranking.rank_ms >= best.over_batches.mean_ms * (1 - 1e-9)
    assert ranking.bound_ms is not None
    assert ranking.bound_ms <= best.over_batches.mean_ms
    again = evaluate(job, parse_plan(best.plan_document(), job, "plan"))
    assert again.over_batches == best.over_batches


def test_a_module_for_each_encoder_is_planned_for_equal_micro_batches() -> None:
    job = sampled(freeze=True, hears=True, layouts="all", mbs=[1])
    lawful = [entry.strategy.arrangement for entry in list_entries(job) if entry.reason is None]
    assert {len(one.each) for one in lawful if one is not None} == {1}
    vision = shared("phases", 1, 8, 3)
    each = replace(vision, others=(replace(vision, encoder=replace(vision.encoder, name="audio")),))
    plan = Plan(Strategy(2, 2, 2, 1, arrangement=each), PHASES.layers, PHASES.recompute, 24)
    with pytest.raises(PlanError, match="a module for each of vision, audio is planned for equal micro-batches"):
        evaluate(job, plan)
