"""The profile table's figures from what MindSpore's profiler leaves: one timeline for each rank that was profiled.

    PROFILE_DATA_DIR/DP16_TP4_PP16_EP8/…rank_0/…/trace_view.json

A timeline shows when each attention kernel starts, forward (`FlashAttentionScore`) and backward (`…Grad`). The YAML
that was profiled says in which order its stage runs them, so each is known by its layer, and a layer's time is the
distance to the next: of forwards of one micro-batch, and of backwards with and without recompute. The head's is what
lies on the last stage between a micro-batch's last forward and its first backward, and what a layer does before its
attention, taken from the shortest way from one micro-batch to the next. Medians over all micro-batches count.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import describe_value, read_text
from mm_autoparallel.integrations.mindformers.dry_runs import find_candidate_folders
from mm_autoparallel.integrations.mindformers.layout import Layout, read_layout
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.integrations.mindformers.profile_table import Candidate, ProfiledCandidate
from mm_autoparallel.pipeline.schedules.action import BACKWARD
from mm_autoparallel.pipeline.schedules.catalog import find_schedule

TIMELINE = "trace_view.json"
_RANK = re.compile(r"rank_?([0-9]+)")
_FORWARD, _BACKWARD = "FlashAttentionScore", "FlashAttentionScoreGrad"
_US_PER_MS = 1000.0
MAX_TIMELINE_BYTES = 1_000_000_000
"""Assumed: several steps of a large model; larger ones take more memory than machines that plan have."""
_LARGEST_US = 1e18
"""Thirty thousand years, and a microsecond is still told from the next: clocks since 1970 are at 2e15."""


@dataclass(frozen=True)
class _Kernel:
    """An attention kernel of a stage: of which of its layers, forward or backward, and whether in a recompute."""

    micro_batch: int
    layer: int
    backward: bool
    again: bool = False


@dataclass
class _Distances:
    """Between neighbours: forward, backward and backward after recompute by the layer's kind (dense or not); `ends_ms`

    and `returns_ms` of the last stage, from a last forward to its backward and from there to the next micro-batch.
    """

    forward_ms: dict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward_ms: dict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))
    again_ms: dict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))
    ends_ms: list[float] = field(default_factory=list)
    returns_ms: list[float] = field(default_factory=list)


def read_profiles(folder: Path, yaml_folder: Path) -> dict[Candidate, ProfiledCandidate]:
    """Candidate → what the timelines in its folder below `folder` tell.

    The YAML that was profiled is looked for in the candidate's folder, then as `NAME_pretrain.yaml` in `yaml_folder`.
    Raises ProfileError naming every folder and file that is missing, is no timeline of that YAML, or shows too little.
    """
    folders = find_candidate_folders(folder)
    read = {candidate: _try_candidate(path, yaml_folder) for candidate, path in folders.items()}
    wrong = [str(error) for error in read.values() if isinstance(error, ProfileError)]
    if wrong:
        raise ProfileError("; ".join(wrong))
    return {candidate: profiled for candidate, profiled in read.items() if isinstance(profiled, ProfiledCandidate)}


def _try_candidate(folder: Path, yaml_folder: Path) -> ProfiledCandidate | ProfileError:
    try:
        return _read_candidate(folder, yaml_folder)
    except ProfileError as error:
        return error


def _read_candidate(folder: Path, yaml_folder: Path) -> ProfiledCandidate:
    yamls = sorted([*folder.glob("*.yaml"), *yaml_folder.glob(f"{folder.name}*.yaml")])
    if not yamls:
        raise ProfileError(
            f"{folder}: the YAML that was profiled is not there, and {yaml_folder} has no {folder.name}_pretrain.yaml; "
            "put it into one of them"
        )
    pretrain = read_pretrain(yamls[0])
    layout = read_layout(pretrain)
    if pretrain.vp > 1:
        raise pretrain.error(
            "model.model_config.pp_interleave_num", "is above 1; profiles of one chunk a stage are read"
        )
    if pretrain.seq_split_num > 1:
        raise pretrain.error("parallel_config.seq_split_num", "is above 1; profiles of whole micro-batches are read")
    timelines = sorted(folder.rglob(TIMELINE))
    if not timelines:
        raise ProfileError(f"{folder}: there is no {TIMELINE} below it; MindSpore's profiler writes one for each rank")
    distances = _Distances()
    for path in timelines:
        match = next((found for found in map(_RANK.search, reversed(path.parts[:-1])) if found), None)
        if match is None:
            raise ProfileError(f"{path}: no folder on its way is called after its rank, like rank_0")
        stage = int(match[1]) // (pretrain.dp * pretrain.tp * pretrain.cp)
        if stage >= pretrain.pp:
            raise ProfileError(f"{path}: {pretrain.path} has no rank {match[1]}")
        _measure(path, pretrain, layout, stage, distances)
    return _figures(folder, pretrain, distances)


def _figures(folder: Path, pretrain: Pretrain, distances: _Distances) -> ProfiledCandidate:
    """Of the layers after the dense ones, which are those with experts where there are any."""

    def middle(values: Sequence[float], what: str) -> float:
        if not values:
            raise ProfileError(
                f"{folder}: no timeline shows {what}; profile a rank of every stage of the YAML that nd-search wrote"
            )
        return median(values)

    forward_ms = middle(distances.forward_ms[False], "two neighbouring layers after the dense ones forward")
    backward_ms = middle(distances.backward_ms[False], "two neighbouring layers backward that are not recomputed")
    again_ms = middle(distances.again_ms[False], "two neighbouring layers backward that are recomputed")
    dense_ms = middle(distances.forward_ms[True], "a dense layer before another") if pretrain.num_dense else forward_ms
    end_ms = middle(distances.ends_ms, "the last stage")
    head_ms = end_ms + min(distances.returns_ms, default=0.0) - forward_ms - backward_ms
    ratios = Ratios(
        dense_ms / forward_ms,
        backward_ms / forward_ms,
        head_ms / (forward_ms + backward_ms),
        (again_ms - backward_ms) / forward_ms,
    )
    if again_ms <= backward_ms or head_ms <= 0:
        what = "recompute" if again_ms <= backward_ms else "the head"
        raise ProfileError(f"{folder}: its timelines would give {what} a negative time; profile it again")
    return ProfiledCandidate(ratios, forward_ms)


def _measure(path: Path, pretrain: Pretrain, layout: Layout, stage: int, distances: _Distances) -> None:
    seen = _attention_starts(path)
    num_backward = pretrain.num_microbatches * layout.layers[0][stage]
    num_forward = num_backward + pretrain.num_microbatches * layout.recompute[0][stage]
    size = num_forward + num_backward
    count, left = divmod(len(seen), size)
    # a YAML that says millions of them is of another timeline, and they are not listed
    expected = list(_kernels_of_step(pretrain, layout, stage)) if count and not left else []
    if not expected or any(
        backward != kernel.backward for (_, backward), kernel in zip(seen, expected * count, strict=True)
    ):
        raise ProfileError(
            f"{path}: it shows {sum(not backward for _, backward in seen)} attention kernels forward and "
            f"{sum(backward for _, backward in seen)} backward; stage {stage} of {pretrain.path} runs "
            f"{num_forward} and {num_backward} a step, in the order of its micro-batches; it is no timeline of whole "
            "steps of that YAML"
        )
    first = sum(layout.layers[0][:stage])
    is_last = stage == pretrain.pp - 1
    for step in range(count):
        starts_ms = [start_us / _US_PER_MS for start_us, _ in seen[step * size : (step + 1) * size]]
        _distances_of_step(starts_ms, expected, first, pretrain.num_dense, layout.layers[0][stage], is_last, distances)


def _distances_of_step(
    starts_ms: Sequence[float],
    kernels: Sequence[_Kernel],
    first: int,
    num_dense: int,
    num_layers: int,
    is_last: bool,
    distances: _Distances,
) -> None:
    """Add those of one step; `first` is the number of the stage's first layer in the model."""
    last_backward: int | None = None
    for index, kernel in enumerate(kernels):
        dense = first + kernel.layer < num_dense
        following = kernels[index + 1] if index + 1 < len(kernels) else None
        same = following is not None and following.micro_batch == kernel.micro_batch
        if same and following and not (kernel.backward or kernel.again or following.backward or following.again):
            distances.forward_ms[dense].append(starts_ms[index + 1] - starts_ms[index])
        if kernel.backward:
            if last_backward is not None and kernels[last_backward].micro_batch == kernel.micro_batch:
                gaps = distances.again_ms if kernels[index - 1].again else distances.backward_ms
                gaps[dense].append(starts_ms[index] - starts_ms[last_backward])
            last_backward = index
        if is_last and following:
            if not kernel.backward and kernel.layer == num_layers - 1 and same and following.backward:
                distances.ends_ms.append(starts_ms[index + 1] - starts_ms[index])
            if kernel.backward and kernel.layer == 0 and not following.backward and not following.again:
                distances.returns_ms.append(starts_ms[index + 1] - starts_ms[index])


def _kernels_of_step(pretrain: Pretrain, layout: Layout, stage: int) -> Iterator[_Kernel]:
    """In the order in which `stage` runs them; the first layers of a stage are recomputed, each before its backward."""
    num_layers, num_again = layout.layers[0][stage], layout.recompute[0][stage]
    order = find_schedule("1f1b", 1).order(pretrain.pp, 1, pretrain.num_microbatches, stage)
    for kind, _, micro_batch in order.tolist():
        if kind != BACKWARD:
            for layer in range(num_layers):
                yield _Kernel(micro_batch, layer, backward=False)
            continue
        for layer in reversed(range(num_layers)):
            if layer < num_again:
                yield _Kernel(micro_batch, layer, backward=False, again=True)
            yield _Kernel(micro_batch, layer, backward=True)


def _attention_starts(path: Path) -> list[tuple[float, bool]]:
    """Start (µs) of every attention kernel on the stream that runs most of them, and whether it is backward."""
    text = read_text(path, "timeline", "JSON text", ProfileError, max_bytes=MAX_TIMELINE_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is no JSON ({error})") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ProfileError(f"{path}: a list of events is expected")
    streams: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for event in events:
        name = event.get("name") if isinstance(event, Mapping) else None
        if not isinstance(name, str) or _FORWARD not in name or "ts" not in event:
            continue
        try:
            start_us = float(event["ts"])
        except (TypeError, ValueError, OverflowError):
            start_us = math.nan
        if not abs(start_us) <= _LARGEST_US:
            raise ProfileError(
                f"{path}: event {describe_value(name)} starts at {describe_value(event['ts'])}; a number of µs is "
                "expected"
            )
        streams[str(event.get("pid")), str(event.get("tid"))].append((start_us, _BACKWARD in name))
    if not streams:
        raise ProfileError(f"{path}: it shows no {_FORWARD} kernel; profile with flash attention on")
    busiest = max(streams, key=lambda stream: len(streams[stream]))
    return sorted(streams[busiest])
