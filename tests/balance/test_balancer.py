"""BatchBalancer: nothing is lost or split, caps are kept, the law is the simulator's, the bound holds for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dealt
import numpy as np
import pytest
from dealings import every_dealing, step_1f1b_ms, sum_loads
from dealt import COST, draw_samples, plan_document, roomy_cap
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_autoparallel import Assignment, BatchBalancer, PlanError, Sample, SampleCost
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.step import simulate

CHAIN = plan_document([6, 2, 0, 0], [0, 4, 9, 7])
CHUNKS = plan_document([[3, 3], [2, 0]], [[0, 0], [3, 5]])
FREE = plan_document(
    [3, 0], [1, 4], schedule="free", order=[["0F0", "1F0", "0I0", "0W0", "1B0"], ["0F0", "0B0", "1F0", "1I0", "1W0"]]
)
_ONE = {"PP": 1, "TP": 1, "CP": 1, "DP": 8, "MBS": 1, "rank_offset": 0}
SIZES = {"vision": _ONE, "llm": _ONE | {"PP": 4, "DP": 2}}
EACH = SIZES | {name: {"kind": "colocated", "encoder_run": "phases"} | _ONE for name in ("vision", "audio")}
AWAY = plan_document([0, 0, 0, 0], [5, 5, 5, 5])
APART = plan_document([4, 0, 0, 0], [0, 6, 7, 7])
APART["layout"] = {
    "kind": "disaggregated",
    "encoder_run": "inline",
    "modules": {
        "vision": {"PP": 1, "TP": 1, "CP": 1, "DP": 1, "MBS": 2, "rank_offset": 6},
        "llm": {"PP": 3, "TP": 1, "CP": 1, "DP": 2, "MBS": 1, "rank_offset": 0},
    },
}
"""One rank of images beside two pipelines of three stages."""


def away(run: str) -> dict:
    """The decoder of AWAY, its encoder beside it."""
    modules = SIZES | {"vision": _ONE | {"DP": 2}} if run == "cached" else SIZES
    order = {"order": [["0F0"]] * 4} if run in ("bubbles", "prefetch") else {}  # which dealing does not look at
    return AWAY | order | {"layout": {"kind": "colocated", "encoder_run": run, "modules": modules}}


def loads(samples: list[Sample], cost: SampleCost) -> list[tuple[float, float]]:
    return [(cost.encoder_ms(sample), cost.decoder_ms(sample)) for sample in samples]


def check_dealing(dealt: Assignment, samples: list[Sample], balancer: BatchBalancer) -> None:
    assert [len(replica) for replica in dealt.ranks] == [balancer.micro_batches] * balancer.dp
    bins = [micro_batch for replica in dealt.ranks for micro_batch in replica]
    assert all(bins)
    assert sorted(i for held in bins for i in held) == list(range(len(samples)))
    assert max(sum(samples[i].num_tokens() for i in held) for held in bins) <= balancer.token_cap
    assert 0.0 < dealt.lower_bound_ms <= dealt.predicted_ms
    assert dealt.regret == pytest.approx(dealt.predicted_ms / dealt.lower_bound_ms - 1.0)
    assert dealt.predicted_ms == balancer.evaluate(dealt.ranks, samples)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), st.integers(0, 60))
def test_nothing_is_lost_and_the_cap_is_kept(seed: int, dp: int, micro_batches: int, more: int) -> None:
    samples = draw_samples(np.random.default_rng(seed), dp * micro_batches + more)
    cap = 2 * roomy_cap(samples, dp * micro_batches)
    balancer = BatchBalancer(CHAIN, dp=dp, micro_batches=micro_batches, token_cap=cap, cost=COST)
    check_dealing(balancer.assign(samples), samples, balancer)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_law_is_that_of_its_text(frozen: bool) -> None:
    random = np.random.default_rng(3)
    cost = replace(COST, encoder_frozen=frozen)
    balancer = BatchBalancer(CHAIN, micro_batches=5, token_cap=10**6, cost=cost)
    for _ in range(10):
        samples = draw_samples(random, 40)
        places = random.integers(0, 10, 40)
        ranks = [[np.flatnonzero(places == 5 * r + m).tolist() for m in range(5)] for r in range(2)]
        steps_ms = [
            step_1f1b_ms(sum_loads(replica, loads(samples, cost)), [6, 2, 0, 0], [0, 4, 9, 7], frozen)
            for replica in ranks
        ]
        assert balancer.evaluate(ranks, samples) == pytest.approx(max(steps_ms), rel=1e-12)
        assert balancer.evaluate(ranks[1:], samples) == pytest.approx(steps_ms[1], rel=1e-12)


@pytest.mark.parametrize("run", ["phases", "recomputed_phases", "bubbles", "prefetch", "cached"])
def test_an_encoder_beside_the_stages_is_an_even_part_of_each(run: str) -> None:
    balancer = BatchBalancer(away(run), micro_batches=4, token_cap=10**6, cost=COST)
    samples = draw_samples(np.random.default_rng(6), 40)
    dealt = balancer.assign(samples)
    check_dealing(dealt, samples, balancer)
    images = 0.0 if run == "cached" else 1.0
    steps_ms = [
        step_1f1b_ms(sum_loads(replica, [(images * e, d) for e, d in loads(samples, COST)]), [1] * 4, [5] * 4, False)
        for replica in dealt.ranks
    ]
    assert dealt.predicted_ms == pytest.approx(max(steps_ms), rel=1e-12)


def test_an_encoder_on_ranks_of_its_own_is_the_first_stages_at_their_own_pace() -> None:
    balancer = BatchBalancer(APART, micro_batches=4, token_cap=10**6, cost=COST)
    samples = draw_samples(np.random.default_rng(7), 32)
    dealt = balancer.assign(samples)
    check_dealing(dealt, samples, balancer)
    slower = [(2.0 * e, d) for e, d in loads(samples, COST)]  # one replica has the samples of two of the decoder's
    steps_ms = [step_1f1b_ms(sum_loads(one, slower), [4, 0, 0, 0], [0, 6, 7, 7], False) for one in dealt.ranks]
    assert dealt.predicted_ms == pytest.approx(max(steps_ms), rel=1e-12)
    arrived = [[list(range(8 * k + 4 * r, 8 * k + 4 * r + 4)) for k in range(4)] for r in range(2)]
    assert dealt.predicted_ms < balancer.evaluate(arrived, samples)


@pytest.mark.parametrize(("document", "schedule"), [(CHUNKS, "interleaved_1f1b"), (CHAIN, "zb_h1"), (CHAIN, "gpipe")])
def test_other_schedules_are_played_as_the_simulator_plays_problems(document: dict, schedule: str) -> None:
    samples = draw_samples(np.random.default_rng(4), 16)
    vision, text = (np.ravel(rows) for rows in document["layer_placement"].values())
    balancer = BatchBalancer(document | {"schedule": schedule}, dp=1, micro_batches=4, token_cap=10**6, cost=COST)
    ranks = balancer.assign(samples).ranks
    held = np.array(sum_loads(ranks[0], loads(samples, COST)))
    num_stages = document["parallel_config"]["PP"]
    blocks = tuple(
        ChainBlock(
            name, name, int(count.sum()), 1 / 3 / count.sum(), 2 / 3 / count.sum(),
            backward_weight_ms=1 / 3 / count.sum(), microbatch_scale=tuple(scale),
        )
        for name, count, scale in (("vision", vision, held[:, 0]), ("text", text, held[:, 1]))
    )  # fmt: skip
    hops = (0.0,) * (len(text) - 1)
    ends = (0.0,) * num_stages
    problem = Problem(
        num_stages, len(text) // num_stages, 4, schedule, blocks, (1e30,) * num_stages, ends, ends, hops, hops
    )
    placement = Placement(tuple(zip(vision.tolist(), text.tolist(), strict=True)), (((), ()),) * len(text))
    assert balancer.evaluate(ranks, samples) == pytest.approx(simulate(problem, placement).step_ms, rel=1e-12)


@pytest.mark.parametrize("document", [plan_document([2, 0], [1, 3]), plan_document([3, 0], [0, 2]), FREE])
@pytest.mark.parametrize("seed", range(3))
def test_no_dealing_is_below_the_bound_and_few_are_better(document: dict, seed: int) -> None:
    random = np.random.default_rng(seed)
    samples = draw_samples(random, int(random.integers(4, 6)))
    cost = replace(COST, encoder_frozen=bool(seed % 2))
    balancer = BatchBalancer(document, dp=2, micro_batches=2, token_cap=10**6, cost=cost)
    dealt = balancer.assign(samples)
    steps_ms = [balancer.evaluate(ranks, samples) for ranks in every_dealing(len(samples), 2, 2)]
    assert min(steps_ms) >= dealt.lower_bound_ms * (1 - 1e-12)
    filled_ms = [
        step_ms
        for step_ms, ranks in zip(steps_ms, every_dealing(len(samples), 2, 2), strict=True)
        if all(map(all, ranks))
    ]
    assert dealt.predicted_ms <= min(filled_ms) * 1.001


def test_a_bound_is_reached() -> None:
    """One stage and equal samples: the bound is the step, so that no weaker one would pass."""
    samples = [Sample((1024,), 100)] * 12
    balancer = BatchBalancer(plan_document([4], [4]), dp=2, micro_batches=3, token_cap=10**4, cost=COST)
    dealt = balancer.assign(samples)
    assert dealt.lower_bound_ms == pytest.approx(sum(map(sum, loads(samples, COST))) / 2, rel=1e-12)
    assert dealt.regret == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_bins_of_six_samples_come_near_equal_micro_batches(seed: int) -> None:
    samples = draw_samples(np.random.default_rng(seed), 8 * 8 * 6)
    document = plan_document([20, 12, 0, 0, 0, 0, 0, 0], [0, 5, 13, 13, 13, 13, 13, 10])
    cap = roomy_cap(samples, 64)
    balancer = BatchBalancer(document, dp=8, micro_batches=8, token_cap=cap, cost=COST)
    total = np.sum(loads(samples, COST), axis=0)
    equal_ms = step_1f1b_ms([tuple(total / 64)] * 8, *document["layer_placement"].values())
    assert balancer.assign(samples).predicted_ms <= 1.1 * equal_ms


DEAL = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from dealt import COST, draw_samples, plan_document
from mm_autoparallel import BatchBalancer
samples = draw_samples(np.random.default_rng(9), 96)
np.random.seed(int(sys.argv[2]))
balancer = BatchBalancer(plan_document([6, 2, 0, 0], [0, 4, 9, 7]), dp=4, micro_batches=4, token_cap=60000, cost=COST)
for _ in range(int(sys.argv[2])):
    balancer.assign(samples[:-1])
print(json.dumps(balancer.assign(samples).ranks))
"""


def test_every_process_finds_the_same() -> None:
    """Whatever it dealt before, and under another seed of hashes."""
    found = subprocess.run(
        [sys.executable, "-c", DEAL, str(Path(dealt.__file__).parent), "1"],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    samples = draw_samples(np.random.default_rng(9), 96)
    balancer = BatchBalancer(CHAIN, dp=4, micro_batches=4, token_cap=60000, cost=COST)
    assert json.loads(found) == json.loads(json.dumps(balancer.assign(samples).ranks))


def test_a_tight_cap_is_packed_by_tokens() -> None:
    samples = [Sample(tokens=tokens) for tokens in (6, 6, 4, 4, 4, 3, 3, 2, 2, 2)]
    balancer = BatchBalancer(plan_document([0, 0], [2, 2]), dp=1, micro_batches=3, token_cap=12, cost=COST)
    check_dealing(balancer.assign(samples), samples, balancer)


def test_the_cap_is_kept_of_models_that_merge_fewer_patches() -> None:
    """LLaVA: each of an image's 576 patches is a token."""
    samples = [Sample((576, 576), text_tokens=200)] * 8
    cost = replace(COST, merge_tokens=1)
    balancer = BatchBalancer(CHAIN, micro_batches=2, token_cap=2704, cost=cost)
    ranks = balancer.assign(samples).ranks
    assert [len(micro_batch) for replica in ranks for micro_batch in replica] == [2] * 4
    told = [replace(sample, tokens=1352) for sample in samples]
    assert balancer.evaluate(ranks, samples) == balancer.evaluate(ranks, told)
    assert cost.decoder_ms(samples[0]) == COST.decoder_ms(told[0]) > COST.decoder_ms(samples[0])
    with pytest.raises(PlanError, match="sample 0 has 1352 tokens, and token_cap is 1351"):
        BatchBalancer(CHAIN, micro_batches=2, token_cap=1351, cost=cost).assign(samples)


def test_audio_is_in_the_tokens_that_a_sample_says() -> None:
    """As `data stats --out` writes both; layers of its encoder are refused, so that it takes nothing more."""
    balancer = BatchBalancer(CHAIN, micro_batches=2, token_cap=1000, cost=COST)
    heard = [Sample(tokens=100 + 10 * i, audio_s=(3.0,)) for i in range(8)]
    assert balancer.assign(heard) == balancer.assign([replace(sample, audio_s=()) for sample in heard])
    with pytest.raises(PlanError, match=r"sample 2 has audio.*give its tokens, of the whole sequence"):
        balancer.assign([*heard[:2], Sample(text_tokens=5, audio_s=(3.0,)), *heard])


def test_numbers_of_numpy_are_whole_numbers() -> None:
    sizes = {"dp": np.int64(2), "micro_batches": np.int32(2), "token_cap": np.int64(1000)}
    balancer = BatchBalancer(CHAIN, cost=SampleCost(np.array(COST.image_ms), COST.token_ms), **sizes)  # type: ignore[arg-type]
    samples = [Sample(tokens=5)] * 4
    assert balancer.evaluate(np.array([[[0, 1]], [[2, 3]]]), samples) == balancer.evaluate(
        [[[0, 1]], [[2, 3]]], samples
    )


def test_a_plan_is_read_from_a_file_or_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(CHAIN | {"global_batch_size": 12}))
    of_file = BatchBalancer(path, token_cap=10**5, cost=COST)
    of_plan = BatchBalancer(of_file.plan, token_cap=10**5, cost=COST)
    assert (of_file.dp, of_file.micro_batches) == (of_plan.dp, of_plan.micro_batches) == (2, 6)
    samples = draw_samples(np.random.default_rng(1), 20)
    assert of_file.assign(samples) == of_plan.assign(samples)


@pytest.mark.parametrize(
    ("document", "given", "message"),
    [
        (CHAIN, {"cost": None}, "give cost=SampleCost"),
        (CHAIN, {"cost": SampleCost((1.0, 2.0), (1.0, 1.0))}, r"cost.image_ms is \(1.0, 2.0\)"),  # type: ignore[arg-type]
        (CHAIN, {"cost": SampleCost((1.0, 2.0, -1.0), (1.0, 1.0))}, "finite and at least 0"),
        (CHAIN, {"cost": SampleCost(("a", 0, 0), (1.0, 1.0))}, "finite and at least 0"),  # type: ignore[arg-type]
        (CHAIN, {"cost": SampleCost(None, (1.0, 1.0))}, "cost.image_ms is None"),  # type: ignore[arg-type]
        (CHAIN, {"cost": ((0, 0, 0), (0, 0))}, r"cost is a list of 2; SampleCost\(image_ms="),
        (CHAIN, {"cost": replace(COST, merge_tokens=0)}, "cost.merge_tokens is 0"),
        (CHAIN, {"dp": 0}, "dp is 0"),
        (CHAIN, {"dp": True}, "dp is true"),
        (CHAIN, {"micro_batches": 2.5}, "micro_batches is 2.5"),
        (CHAIN, {"token_cap": 0}, "token_cap is 0"),
        (CHAIN, {"micro_batches": None}, "the plan: global_batch_size is missing; give it there, or micro_batches$"),
        (CHAIN | {"schedule": "seq_1f1b_2"}, {}, "schedule is seq_1f1b_2"),
        (AWAY | {"layout": {"modules": EACH}}, {}, "layout is colocated in phases, vision PP 1.* a module for each"),
        (FREE, {"micro_batches": 3}, "does not run 3 micro-batches"),
        ({"parallel_config": {"PP": 2}}, {}, "parallel_config.TP is missing"),
        (7, {}, "plan is 7"),
    ],
)
def test_what_is_wrong_of_a_plan_is_said(document: object, given: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        BatchBalancer(document, **({"dp": 2, "micro_batches": 2, "token_cap": 1000, "cost": COST} | given))  # type: ignore[arg-type]


def test_an_audio_encoder_beside_the_stages_is_refused() -> None:
    layout = {"kind": "colocated", "encoder_run": "phases", "modules": {"audio": _ONE, "llm": SIZES["llm"]}}
    with pytest.raises(PlanError, match="layers of audio"):
        BatchBalancer(AWAY | {"layout": layout}, micro_batches=2, token_cap=1000, cost=COST)


def test_audio_layers_are_refused() -> None:
    document = plan_document([2, 0], [1, 3])
    document["layer_placement"] = {"audio_layer_placement": [2, 0]} | document["layer_placement"]
    with pytest.raises(PlanError, match="layers of audio"):
        BatchBalancer(document, micro_batches=2, token_cap=1000, cost=COST)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([Sample(tokens=5)] * 3, "3 samples are fewer than the 4 micro-batches"),
        ([Sample(tokens=5)] * 4 + [Sample(tokens=101)], "sample 4 has 101 tokens, and token_cap is 100"),
        ([Sample(tokens=60)] * 7, "the samples have 420 tokens"),
        ([Sample(tokens=60)] * 5, "no packing of 5 samples"),
        ([Sample(tokens=5)] * 4 + [Sample((-4,))], "sample 4 is"),
        ([Sample(tokens=5)] * 4 + [Sample(tokens=10**30)], "whole numbers from 0 to 1,000,000,000"),
        ([Sample(tokens=5)] * 4 + [Sample((2.5,))], "whole numbers"),  # type: ignore[arg-type]
        ([Sample((16,))] * 4, "the plan has no vision layers"),
        ([Sample(tokens=5)] * 4 + [Sample(tokens="5")], "sample 4 is Sample.*whole numbers"),  # type: ignore[arg-type]
        ([Sample(4096)] * 4, r"sample 0 is Sample\(patches=4096, .*patches is a tuple"),  # type: ignore[arg-type]
        ([Sample(tokens=5, audio_s=("a",))] * 4, "audio_s are seconds"),  # type: ignore[arg-type]
        ([Sample(tokens=5), {"tokens": 5}], "sample 1 is a mapping; Sample"),  # type: ignore[list-item]
        ((Sample(tokens=5) for _ in range(4)), "the samples are of type generator; a list of Sample"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_of_samples_is_said(samples: list[Sample], message: str) -> None:
    balancer = BatchBalancer(plan_document([0, 0], [2, 2]), micro_batches=2, token_cap=100, cost=COST)
    with pytest.raises(PlanError, match=message):
        balancer.assign(samples)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[[0, 1], [2]], [[1], [3]]], "sample 1, which is dealt twice"),
        ([[[0, 1], [4]]], "sample 4, which is none of the 4"),
        ([[[0]], []], "replica 1 has no micro-batch"),
        ([], "no replica"),
        ([[0, 1], [2, 3]], r"the dealing is malformed .*are expected: \[\[\[0, 3\]"),
        ([[[0.5]]], "the dealing is malformed"),
    ],
)
def test_what_is_wrong_of_a_dealing_is_said(ranks: list, message: str) -> None:
    balancer = BatchBalancer(CHAIN, micro_batches=2, token_cap=100, cost=COST)
    with pytest.raises(PlanError, match=message):
        balancer.evaluate(ranks, [Sample(tokens=5)] * 4)
