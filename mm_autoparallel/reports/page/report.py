"""What a page holds: the models that the browser's types are generated from (docs/tools/renew.py makes the schema).

Figures are those of `plan --json`, `simulate --json` and `explain --json`. What every task of a step has, or every
device of a cluster, would be long in words: it lies as whole numbers in a block of bytes behind the document (Numbers).
"""

from __future__ import annotations

from typing import Literal

from mm_autoparallel.records import Noun

SCHEMA = "mm-autoparallel/report/1"


class Numbers(Noun):
    """`count` whole numbers of `width` bytes each, little-endian, from byte `offset` of the block on."""

    offset: int
    count: int
    width: Literal[1, 2, 4]


class TaskKind(Noun):
    """What tasks of one kind, virtual stage and class of micro-batches have in common. recompute_ms: of length_ms.
    encoder: whose passes beside the pipeline they are, which count as micro-batches, and their pieces as chunks; empty
    of its own tasks."""

    backward: bool
    chunk: int
    length_ms: float
    recompute_ms: float
    encoder: str = ""


class Timeline(Noun):
    """The tasks of one step, stage by stage, in the order in which a stage works.

    first: [P + 1], where each stage's tasks begin. Times are whole numbers of tick_ms: start, end, the idle time of the
    stage before each task, and how much of that a transfer takes: the rest is imbalance, but before a stage's first
    task all of it is warm-up, and `transfer` 0. kind: places in `kinds`. on_path: 1 on the longest path. held: what the
    stage holds on its device from the task's event on (the start of a forward, the end of a backward), whole numbers of
    tick_bytes; held_first_bytes: before the first task. tail_ms, cooldown_ms: [P], after a stage's last task, and idle
    after that. mean_idle_ms: of all stages, by cause.
    """

    step_ms: float
    tick_ms: float
    tick_bytes: float
    first: tuple[int, ...]
    start: Numbers
    end: Numbers
    idle: Numbers
    transfer: Numbers
    kind: Numbers
    micro_batch: Numbers
    on_path: Numbers
    held: Numbers
    kinds: tuple[TaskKind, ...]
    held_first_bytes: tuple[float, ...]
    tail_ms: tuple[float, ...]
    cooldown_ms: tuple[float, ...]
    mean_idle_ms: dict[str, float]


class Stage(Noun):
    """One stage of a plan. layers, modes: counts of every chunk by modality (and mode, recompute too).

    time_ms: where its step goes, by cause; the parts add up to the step. memory_bytes: its peak by cause; the parts add
    up to peak_bytes, which must be within limit_bytes. device_peak_bytes: with the allocator's fragments, of a device's
    device_bytes. host_bytes: on its host; host_limit_bytes: None where that is not limited.
    """

    layers: dict[str, tuple[int, ...]]
    modes: dict[str, dict[str, tuple[int, ...]]]
    time_ms: dict[str, float]
    memory_bytes: dict[str, float]
    peak_bytes: float
    limit_bytes: float
    device_peak_bytes: float
    device_bytes: float
    host_bytes: float
    host_limit_bytes: float | None
    path_ms: float


class Group(Noun):
    """Where a kind of group lies on the cluster, as `GroupPlace`. source: of bandwidth_bytes_per_s, in words."""

    name: str
    size: int
    stride: int
    level: str
    bandwidth_bytes_per_s: float
    num_groups: int
    source: str


class Devices(Noun):
    """The devices that the plan uses, in the order of their ranks. nodes: how many of them lie in each node.

    stage, tp, cp, dp: the rank's place in each of its groups.
    """

    nodes: tuple[int, ...]
    stage: Numbers
    tp: Numbers
    cp: Numbers
    dp: Numbers


class Module(Noun):
    """An encoder or a decoder of sizes of its own. replicas: of the first ones the ranks of each stage, as text.

    sizes: PP, TP and so on. num_layers: of its own part of the model. first_stage: what the pipeline numbers its first.
    """

    name: str
    first_stage: int
    sizes: dict[str, int]
    num_layers: int
    replicas: tuple[tuple[str, ...], ...]


class ModuleShare(Noun):
    """What an encoder of a layout, or its decoder, takes of every stage. runs: how, as `colocated in phases`.

    work_ms: its forwards and backwards of a step. held_bytes: weights, gradients and optimizer. kept_bytes: the most
    activations and outputs of it at once.
    """

    name: str
    runs: str
    sizes: dict[str, int]
    work_ms: tuple[float, ...]
    held_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]


class Layout(Noun):
    """Where encoder and decoder run, and what goes between them.

    words: kind and way to run, as `colocated in phases`. pairs: places of an encoder's and a decoder's replica that
    exchange features, of those listed. size_bytes: what a decoder's replica gets of one micro-batch, pass of the
    encoder or step, as `per` says; forward_ms, backward_ms: how long that takes. blocks: both sides stand still then.
    others: where several encoders are modules, the same of each but the first, beside the same decoder.
    """

    words: str
    encoder: Module
    decoder: Module
    pairs: tuple[tuple[int, ...], ...]
    size_bytes: float
    forward_ms: float
    backward_ms: float
    blocks: bool
    per: Literal["micro_batch", "pass", "step"]
    others: tuple[Layout, ...] = ()


class Spread(Noun):
    """The step over drawn batches. counts: of batches, in equal parts of the time from low_ms to high_ms.

    marks_ms: mean, p95 and so on, by the names of the result file. words: the same in a sentence.
    """

    words: str
    low_ms: float
    high_ms: float
    counts: tuple[int, ...]
    marks_ms: dict[str, float]


class BlockSource(Noun):
    """Where the figures of one kind of block come from."""

    block: str
    time: str
    memory: str


class Unstated(Noun):
    """A fact that the job does not state, and what the plan takes under the other reading, in words."""

    key: str
    words: str


class PlanPage(Noun):
    """One plan. file: the text of its result file. low_step_ms, high_step_ms: None where every block was measured.
    layout: None of the chain; modules: of each encoder and the decoder, nothing of the chain. spread: None where the
    job does not say what samples are like.

    provenance: where its figures come from, a sentence for each kind of figure (reports/page/provenance.py).
    """

    name: str
    strategy: str
    sizes: dict[str, int | str | bool]
    schedule: str
    num_microbatches: int
    step_ms: float
    low_step_ms: float | None
    high_step_ms: float | None
    throughput_tokens_per_s: float
    bubble_fraction: float
    fits: bool
    oom_probability: float
    chance: str
    longest_path: str
    calibration: str
    warnings: tuple[str, ...]
    unstated: tuple[Unstated, ...]
    provenance: dict[str, str]
    stages: tuple[Stage, ...]
    groups: tuple[Group, ...]
    devices: Devices
    layout: Layout | None
    modules: tuple[ModuleShare, ...]
    spread: Spread | None
    sources: tuple[BlockSource, ...]
    timeline: Timeline
    file: str


class Strategies(Noun):
    """Every strategy of the searched space, a column each; `statuses`, `causes` and `reasons` hold each text once.

    sizes: PP, TP and so on. status, cause, reason: places in those. bound_ms: no placement ranks below; step_ms: of the
    best placement found; rank_ms: with the price of its chance to fail; peak_bytes: of its fullest stage;
    overflow_bytes: the least that its worst stage is over. None where unknown. limit_bytes: what a stage may hold.
    """

    sizes: dict[str, tuple[int | str | bool, ...]]
    schedule: tuple[str, ...]
    statuses: tuple[str, ...]
    causes: tuple[str, ...]
    reasons: tuple[str, ...]
    status: tuple[int, ...]
    cause: tuple[int, ...]
    reason: tuple[int, ...]
    bound_ms: tuple[float | None, ...]
    step_ms: tuple[float | None, ...]
    rank_ms: tuple[float | None, ...]
    peak_bytes: tuple[float | None, ...]
    overflow_bytes: tuple[float | None, ...]
    limit_bytes: tuple[float, ...]


class Search(Noun):
    """How a search ended. verdict: in words, a line each. provenance: as of a plan."""

    step_ms: float
    lower_bound_ms: float
    gap_fraction: float
    proven: bool
    stopped: str
    elapsed_s: float
    verdict: tuple[str, ...]
    provenance: dict[str, str]
    strategies: Strategies


class Share(Noun):
    """What one plan's step owes to a source: its step with the source faster and slower, and its share of the step."""

    low_step_ms: float
    high_step_ms: float
    share_fraction: float


class CostSource(Noun):
    """One source of the times. flips: the change at which two plans change places, in words; empty: none."""

    name: str
    source: str
    error_fraction: float
    plans: tuple[Share, ...]
    flips: str


class Sources(Noun):
    """What the plans' order hangs on. change_fraction: by how much each source is changed. notes: a sentence each."""

    change_fraction: float
    rows: tuple[CostSource, ...]
    notes: tuple[str, ...]


class JobPage(Noun):
    """The job. text: its file, None where it never was one. facts: what a reader wants to know first, in words."""

    name: str
    text: str | None
    sha256: str
    facts: tuple[str, ...]


class Report(Noun):
    """A whole page. command: what makes it again. search: None where only given plans were asked for."""

    schema_name: str
    version: str
    command: str
    job: JobPage
    plans: tuple[PlanPage, ...]
    search: Search | None
    sources: Sources | None
    warnings: tuple[str, ...]
