"""The law of layouts of modules: what each rule refuses, and with which words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from two_modules import apart, make_job, shared

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job


def reason(strategy: Strategy, **job: Any) -> str | None:
    made = make_job(**job)
    return unlawful_reason(made.model, made.cluster, made.workload, strategy)


LAWFUL = [
    Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 4, 1)),
    Strategy(3, 2, 1, 1, arrangement=apart(1, 4, 1, 1)),
    Strategy(4, 2, 1, 2, arrangement=apart(2, 1, 2, 1)),
    Strategy(3, 2, 1, 1, arrangement=apart(1, 4, 1, 1, offset=0)),
    Strategy(1, 4, 2, 4, arrangement=shared("inline", 1, 8, 1)),
    Strategy(2, 2, 2, 1, arrangement=shared("phases", 1, 8, 3)),
    Strategy(2, 2, 2, 1, arrangement=shared("recomputed_phases", 4, 2, 1)),
    Strategy(2, 2, 2, 1, vpp=2, arrangement=shared("phases", 1, 8, 1)),
    Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 2, 2, cp=2)),
    Strategy(2, 2, 2, 1, arrangement=shared("phases", 2, 2, 1, cp=2)),
    Strategy(2, 2, 2, 1, arrangement=shared("bubbles", 1, 4, 1, cp=2)),
    Strategy(1, 4, 2, 4, arrangement=shared("inline", 4, 1, 8, cp=2)),
    Strategy(1, 4, 2, 4, zero=3, arrangement=shared("inline", 1, 8, 1)),
    Strategy(1, 4, 2, 1, zero=2, arrangement=shared("recomputed_phases", 1, 8, 3)),
    Strategy(2, 4, 1, 4, zero=3, arrangement=apart(1, 1, 4, 1)),
]


@pytest.mark.parametrize("strategy", LAWFUL)
def test_lawful(strategy: Strategy) -> None:
    assert reason(strategy) is None


BROKEN = [
    (Strategy(3, 2, 1, 6, arrangement=apart(1, 1, 4, 1)), "MBS 6 x DP 1 samples, which the encoder's DP 4"),
    (Strategy(3, 1, 2, 1, arrangement=apart(1, 1, 3, 1)), "one must divide the other"),
    (Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 4, 1, offset=3)), "the two ranges overlap"),
    (Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 4, 1, offset=5)), "leave ranks idle"),
    (Strategy(3, 2, 1, 2, arrangement=apart(1, 1, 2, 1, offset=0)), "begins at rank 2, inside a node of 4"),
    (Strategy(3, 2, 2, 2, arrangement=apart(1, 1, 4, 1, offset=8)), "are more than the 8 devices"),
    (Strategy(5, 2, 1, 4, arrangement=apart(3, 1, 1, 4)), "needs a layer a stage, and vision has 2"),
    (Strategy(1, 2, 1, 4, arrangement=apart(1, 1, 4, 1)), "leaves the decoder none"),
    (Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 4, 1, name="audio")), "names the encoder audio"),
    (Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 1, 4, cp=3)), "CP 3 does not divide the 256 tokens that vision"),
    (Strategy(2, 2, 2, 1, arrangement=shared("phases", 1, 8, 1, cp=2)), "TP 1 x CP 2 x DP 8 = 16"),
    (Strategy(2, 2, 2, 1, arrangement=shared("bubbles", 1, 2, 1, cp=4)), "TP 1 x CP 4 does not divide the 2 ranks"),
    (Strategy(1, 2, 2, 1, cp=2, arrangement=shared("inline", 2, 2, 1, cp=2)), "is the chain"),
    (Strategy(3, 2, 1, 4, schedule="gpipe", arrangement=apart(1, 1, 4, 1)), "planned for 1f1b"),
    (Strategy(3, 2, 1, 4, zero=3, arrangement=apart(1, 1, 4, 1)), "ZeRO 3 with PP 2"),
    (Strategy(3, 4, 1, 4, zero=2, arrangement=apart(2, 1, 2, 2)), "of the encoder: ZeRO 2 with PP 2"),
    (Strategy(2, 2, 2, 1, zero=3, arrangement=shared("bubbles", 1, 8, 1)), "ZeRO 3: passes in bubbles lie between"),
    (Strategy(1, 4, 2, 4, zero=3, reshard=False, arrangement=shared("inline", 1, 8, 1)), "gives up after each pass"),
    (Strategy(1, 4, 2, 4, zero=3, shard=2, arrangement=shared("inline", 1, 8, 1)), "gives up after each pass"),
    (Strategy(1, 4, 2, 4, optimizer_offload=True, arrangement=shared("inline", 1, 8, 1)), "optimizer on the device"),
    (Strategy(2, 2, 2, 4, arrangement=shared("inline", 1, 8, 1)), "decoder of one stage, and its PP is 2"),
    (Strategy(1, 4, 2, 4, arrangement=shared("inline", 4, 2, 4)), "is the chain"),
    (Strategy(2, 2, 2, 1, arrangement=shared("phases", 1, 4, 1)), "share all ranks"),
    (Strategy(2, 2, 2, 1, arrangement=shared("phases", 1, 8, 2)), "no multiple of the encoder's DP 8 x MBS 2"),
    (Strategy(2, 2, 2, 1, arrangement=shared("phases", 1, 4, 1, pp=2)), "holds the whole encoder"),
]


@pytest.mark.parametrize(("strategy", "words"), BROKEN)
def test_broken(strategy: Strategy, words: str) -> None:
    assert words in (reason(strategy) or "lawful")


DISAGGREGATED, INLINE, PHASES = LAWFUL[0], LAWFUL[4], LAWFUL[5]


@pytest.mark.parametrize(
    ("stack", "freeze", "strategy", "words"),
    [
        ("megatron-te", False, DISAGGREGATED, None),
        ("megatron-local", False, INLINE, None),
        ("megatron-te", False, PHASES, "it runs disaggregated and colocated inline"),
        ("megatron-te", False, LAWFUL[12], "no layout of workload.stack megatron-te is planned with it"),
        ("megatron-te", False, LAWFUL[8], "layouts of workload.stack megatron-te have encoders of CP 1"),
        ("mindspeed-mm", True, LAWFUL[9], "layouts of workload.stack mindspeed-mm have encoders of CP 1"),
        ("mindspeed-mm", True, PHASES, None),
        ("mindspeed-mm", False, PHASES, "runs forward only"),
        ("mindspeed-mm", True, INLINE, None),
        ("mindspeed-mm", False, INLINE, "hands on no gradients"),
        ("mindspeed-mm", True, replace(PHASES, pp=1, dp=2 * PHASES.dp), "in every micro-batch"),
        ("mindspeed-mm", True, DISAGGREGATED, "it runs colocated phases"),
        ("mindspeed", False, DISAGGREGATED, "one parallel size for encoder and decoder"),
    ],
)
def test_what_frameworks_run(stack: str, freeze: bool, strategy: Strategy, words: str | None) -> None:
    told = reason(strategy, stack=stack, freeze=freeze)
    assert told is None if words is None else words in (told or "lawful")


def test_megatron_takes_powers_of_two() -> None:
    strategy = Strategy(3, 3, 1, 4, arrangement=apart(1, 1, 2, 2, offset=6))
    job = make_job(stack="megatron-te")
    text = job.model.text.model_copy(update={"layers": job.model.text.layers.model_copy(update={"num_heads": 6})})
    model = job.model.model_copy(update={"text": text})
    cluster = job.cluster.model_copy(update={"num_nodes": 1, "devices_per_node": 9})
    assert "powers of two" in (unlawful_reason(model, cluster, job.workload, strategy) or "lawful")


def test_jobs_that_ask_for_what_cannot_be() -> None:
    with pytest.raises(JobError, match=r"search.layouts names colocated, and it cannot be run"):
        make_job(stack="mindspeed", layouts=["colocated"])
    with pytest.raises(JobError, match=r"search.devices is \[16\], and the cluster has 8 devices"):
        make_job(devices=[16])
    with pytest.raises(JobError, match="layouts"):
        make_job(layouts=["side by side"])
    with pytest.raises(JobError, match=r"search.encoder_cp is \[1, 2\], of encoders with sizes of their own"):
        make_job(encoder_cp=[1, 2])
    alone = make_job()
    content = {
        "model": {"text": alone.model.text.model_dump(exclude_none=True)},
        "cluster": {"num_nodes": 2, "devices_per_node": 4, "device": "a100-80g"},
        "workload": {"global_batch_size": 24, "seq_length": 1024},
        "search": {"layouts": ["disaggregated"]},
    }
    with pytest.raises(
        JobError, match=r"search.layouts names disaggregated, and there is none: .* and the model has none"
    ):
        parse_job(content, Path("job.yaml"))
    (warning,) = parse_job(content | {"search": {"layouts": "all"}}, Path("job.yaml")).warnings
    assert warning.startswith("search.layouts is all, and the chain alone is planned")
    for asked, reason in (
        ({"stack": "mindspeed"}, "workload.stack mindspeed has one parallel size for encoder and decoder"),
        ({"schedule": "zb_h1"}, "arrangements are planned for 1f1b and interleaved_1f1b, and search.schedule asks"),
    ):
        (warning,) = make_job(layouts="all", **asked).warnings
        assert warning.startswith(f"search.layouts is all, and the chain alone is planned: {reason}")
    assert not make_job(layouts="all", schedule=["1f1b", "zb_h1"]).warnings


def test_a_vocabulary_that_alone_limits_tensor_parallel_is_said() -> None:
    """InternVL2-76B's encoder has 25 heads, and its vocabulary is odd: a decoder with sizes of its own has but that."""
    path = Path(__file__).resolve().parents[2] / "examples" / "internvl2_76b" / "job.yaml"
    document = read_document(path, "job file")
    assert not parse_job(document, path).warnings  # its chain cannot be shared anyway
    (warning,) = parse_job(document | {"search": {"layouts": "all"}}, path).warnings
    assert warning == (
        "the vocabulary, 128265, alone keeps TP 2, 4, 8 out of the search; if the framework pads it, as Megatron-LM "
        "does to a multiple of 128 times TP, state that as vocab_size: 129024"
    )
    assert not parse_job(document | {"search": {"layouts": "all", "tp": [1]}}, path).warnings
    job = make_job()
    for vocab_size, expected in ((1001, "TP 2, 4"), (1002, "TP 4"), (1004, "")):  # TP 3 is of no eight devices
        text = job.model.text.model_dump(exclude_none=True) | {"vocab_size": vocab_size}
        text["layers"] |= {"hidden_size": 768, "ffn_size": 3072, "num_heads": 12, "num_kv_groups": 12}
        content = {
            "model": {"text": text},
            "cluster": {"num_nodes": 2, "devices_per_node": 4, "device": "a100-80g"},
            "workload": {"global_batch_size": 24, "seq_length": 1024},
        }
        said = parse_job(content, Path("job.yaml")).warnings
        assert len(said) == bool(expected)
        assert all(f"alone keeps {expected} out of the search" in each for each in said)


def test_several_encoders_are_one_module_where_no_stack_is_named() -> None:
    both = replace(shared("phases", 1, 8, 3), encoder=replace(shared("phases", 1, 8, 3).encoder, name="vision+audio"))
    strategy = Strategy(2, 2, 2, 1, arrangement=both)
    assert reason(strategy, hears=True) is None
    assert strategy.away == ("vision", "audio")
    named = reason(strategy, hears=True, stack="megatron-te")
    assert named is not None
    assert "an arrangement of megatron-te is planned for one encoder, and the model's are vision, audio" in named
    deep = replace(both, kind="disaggregated", encoder_run="inline", encoder=replace(both.encoder, pp=4, dp=1, mbs=4))
    told = reason(
        Strategy(6, 2, 1, 4, arrangement=replace(deep, encoder=replace(deep.encoder, rank_offset=4))), hears=True
    )
    assert told == "encoder PP 4 needs a layer a stage, and vision+audio has 3"


def test_ranks_that_deal_heads_deal_whole_ones() -> None:
    job = make_job()
    dealt = job.workload.model_copy(update={"context_parallel": "all_to_all"})
    for cp, words in ((4, None), (3, "does not divide the attention heads of vision, 8")):
        strategy = Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 1, 4, cp=cp))
        told = unlawful_reason(job.model, job.cluster, dealt, strategy)
        assert told is None if words is None else words in (told or "lawful")


def test_a_class_token_lies_with_one_rank() -> None:
    job = make_job()
    (tower,) = job.model.encoders
    stem = tower.stem.model_copy(update={"class_token": True})
    model = job.model.model_copy(update={"encoders": (tower.model_copy(update={"stem": stem}),)})
    told = unlawful_reason(model, job.cluster, job.workload, LAWFUL[8])
    assert told == "the encoder's CP is 2, and vision has a class token, which would lie with one rank"


def test_sizes_of_both_modules() -> None:
    strategy = DISAGGREGATED
    assert strategy.world_size == 8
    assert (strategy.of_decoder().pp, strategy.of_decoder().world_size) == (2, 4)
    assert (strategy.of_encoder().pp, strategy.of_encoder().dp, strategy.of_encoder().mbs) == (1, 4, 1)
    assert replace(strategy, arrangement=None).world_size == 6
