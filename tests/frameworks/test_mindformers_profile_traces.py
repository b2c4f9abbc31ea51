"""The profile table's figures from timelines: those of a stage whose kernels start when known times say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.integrations.mindformers.profile_traces import read_profiles

EXAMPLE = Path(__file__).parents[2] / "examples" / "mindformers" / "pretrain_deepseek3.yaml"
CANDIDATE = (16, 4, 16, 8)
NAME = "DP16_TP4_PP16_EP8"
# ms: a dense and an expert layer forward and backward, recompute of each, the head forward and backward together
DENSE, EXPERT, BACKWARD_SHARE, AGAIN_SHARE, HEAD = 2.0, 5.0, 1.8, 0.9, 12.0
BEFORE_ATTENTION = 0.25
"""The share of a layer's forward that its attention waits for; of its backward, that follows its attention's."""


def steps_of_stage(layers: list[bool], num_again: int, order: str, is_last: bool, pause: float) -> list[dict[str, Any]]:
    """Events of `order` (F and B of micro-batches in turn); layers: whether each is dense, num_again recomputed."""
    events, now = [], 0.0
    for kind in order:
        if kind == "F":
            for dense in layers:
                forward = DENSE if dense else EXPERT
                events.append(("FlashAttentionScore_FlashAttentionScore", now + BEFORE_ATTENTION * forward))
                now += forward
            now += HEAD if is_last else pause
            continue
        for index, dense in reversed(list(enumerate(layers))):
            forward = DENSE if dense else EXPERT
            if index < num_again:
                events.append(("FlashAttentionScore_FlashAttentionScore", now + BEFORE_ATTENTION * forward))
                now += AGAIN_SHARE * forward
            backward = BACKWARD_SHARE * forward
            events.append(("FlashAttentionScoreGrad_FlashAttentionScoreGrad", now + (1 - BEFORE_ATTENTION) * backward))
            now += backward
        now += 0.0 if is_last else pause
    return [
        {"name": f"Default/network/{name}", "ph": "X", "pid": 7, "tid": 2, "ts": f"{start * 1000:.3f}"}
        for name, start in events
    ]


@pytest.fixture
def profiled(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A candidate profiled as two stages of DP 4 and TP 4, five layers and three, with four micro-batches."""

    def write(edit: Callable[[list[dict[str, Any]]], Any] = lambda events: None) -> tuple[Path, Path]:
        yamls = tmp_path / "profile_yaml"
        yamls.mkdir()
        text = EXAMPLE.read_text(encoding="utf-8")
        for old, new in (
            ("pipeline_stage: 8", "pipeline_stage: 2"),
            ("&micro_batch_num 32", "&micro_batch_num 4"),
            ("&num_layers 29", "&num_layers 7"),
            ("offset: 0", "offset: [1, -1]"),
            ("recompute: True  # every layer", "recompute: [5, 0]  #"),
        ):
            assert text.count(old) == 1
            text = text.replace(old, new)
        (yamls / f"{NAME}_pretrain.yaml").write_text(text, encoding="utf-8")
        first = steps_of_stage([True] * 3 + [False] * 2, 5, "FFBFBFBB", is_last=False, pause=3.0)
        last = steps_of_stage([False] * 3, 0, "FBFBFBFB", is_last=True, pause=0.0)
        edit(last)
        for rank, events in ((0, first), (16, last)):
            folder = tmp_path / "data" / NAME / f"rank_{rank}" / "ASCEND_PROFILER_OUTPUT"
            folder.mkdir(parents=True)
            events = [
                *events,
                {"name": "FlashAttentionScore", "pid": 1, "tid": 1, "ts": 0.0},
                {"name": "MatMul", "ts": 1},
            ]
            (folder / "trace_view.json").write_text(json.dumps(events), encoding="utf-8")
        return tmp_path / "data", yamls

    return write


def test_known_times_come_out(profiled: Callable[..., tuple[Path, Path]]) -> None:
    found = read_profiles(*profiled())
    ratios = found[CANDIDATE].ratios
    assert found[CANDIDATE].expert_forward_ms == pytest.approx(EXPERT)
    assert ratios.layer_factor == pytest.approx(DENSE / EXPERT)
    assert ratios.backward_factor == pytest.approx(BACKWARD_SHARE)
    assert ratios.recompute_factor == pytest.approx(AGAIN_SHARE)
    # forward and backward of the head stand in the ratio of a layer's
    assert ratios.head_factor == pytest.approx(HEAD / (EXPERT * (1 + BACKWARD_SHARE)), rel=1e-6)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda events: events.pop(), ["rank_16", "12 attention kernels forward", "11 backward", "whole steps"]),
        (lambda events: events.clear(), ["rank_16", "stage 1"]),
        (lambda events: events[0].update(ts="soon"), ["rank_16", "soon"]),
        (lambda events: events[0].update(ts="nan"), ["rank_16", "nan"]),
        (lambda events: events[0].update(ts=10**400), ["rank_16", "a number of µs is expected"]),
    ],
)
def test_a_timeline_of_another_run_is_named(
    profiled: Callable[..., tuple[Path, Path]], edit: Callable[[list[dict[str, Any]]], Any], words: list[str]
) -> None:
    with pytest.raises(ProfileError) as error:
        read_profiles(*profiled(edit))
    for word in words:
        assert word in str(error.value)


def test_a_yaml_of_millions_of_kernels_is_of_another_run(profiled: Callable[..., tuple[Path, Path]]) -> None:
    data, yamls = profiled()
    (path,) = yamls.iterdir()
    text = path.read_text(encoding="utf-8").replace("&micro_batch_num 4", "&micro_batch_num 10000")
    path.write_text(text.replace("&num_layers 7", "&num_layers 9007"), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"stage 0 of .* runs 45100000 and 45050000 a step"):
        read_profiles(data, yamls)


def test_what_is_missing_is_named(profiled: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    data, yamls = profiled()
    with pytest.raises(ProfileError, match="the YAML that was profiled is not there"):
        read_profiles(data, tmp_path / "nowhere")
    (data / NAME / "rank_16" / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").unlink()
    with pytest.raises(ProfileError, match="two neighbouring layers backward that are not recomputed"):
        read_profiles(data, yamls)
    (data / NAME / "rank_0" / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").unlink()
    with pytest.raises(ProfileError, match=r"no trace_view\.json"):
        read_profiles(data, yamls)
    (data / NAME).rename(data / "first_run")
    with pytest.raises(JobError, match="no folder in it is called after a candidate"):
        read_profiles(data, yamls)
