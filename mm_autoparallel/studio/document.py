"""What the studio's page and its server say to each other: the models that the browser's types are generated from.

The page draws a `Studio`; whatever a person does is an `Action` on the revision that the page has drawn. No number is
computed in the browser.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mm_autoparallel.records import MAX_NAME, Few, Flag, Name, Noun, Number
from mm_autoparallel.reports.page.report import Report, Strategies

SCHEMA = "mm-autoparallel/studio/1"

Seconds = Annotated[float, Field(strict=True, gt=0, le=86_400)]
Words = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_NAME)]
Value = Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True, allow_inf_nan=False)] | Flag | Words
"""Of a size of a strategy, or of a key of a job file."""


Amount = float
"""Of the unit that stands beside it."""

Figure = Amount | int | str
"""The same, or a name."""

Unit = Literal["", "bytes", "bytes/s", "tokens", "samples"]


class SizeChoices(Noun):
    """A size of the strategy, or its schedule. choices: those that the job's space has, in order."""

    name: str
    value: int | str | bool
    choices: tuple[int | str | bool, ...]


class Knob(Noun):
    """What may be otherwise in the job. key: of the job file. value: as it is now; given: as the file has it.

    choices: to take from; empty where any figure from `low` to `high` may be taken. unit: of the figures, to be shown.
    whole: only whole numbers may be taken.
    """

    key: str
    title: str
    value: Figure
    given: Figure
    choices: tuple[Figure, ...] = ()
    low: Amount | None = None
    high: Amount | None = None
    unit: Unit = ""
    whole: bool = False


class Bound(Noun):
    """How far the plan can be from the best. words: a sentence that says so, and what the bound is of.

    lower_bound_ms: in steps of the plan, no plan of the job's space ranks before; None while no search of this job has
    ended, or the job has been changed since. gap_fraction: of the plan against it. strategy_bound_ms,
    strategy_gap_fraction: the same against the plans of its own strategy.
    """

    words: str
    lower_bound_ms: float | None
    gap_fraction: float | None
    proven: bool
    strategy_bound_ms: float | None
    strategy_gap_fraction: float | None


class Difference(Noun):
    """What the plan as it stands takes more than the plan `name`; less where below 0.

    step_fraction: of that plan's step. peak_bytes: of the fullest stage of each.
    """

    name: str
    step_ms: float
    step_fraction: float
    peak_bytes: float


class Answer(Noun):
    """A question that was asked, and what was found. step_ms: of the best plan that does as was asked, if any."""

    question: str
    words: tuple[str, ...]
    step_ms: float | None


class Work(Noun):
    """What runs in the background. line: how many strategies have their end, in words, where that is known.
    done_fraction: of its strategies, or of its time.

    gap_fraction: of the best plan so far against the bound so far; None while one of them is missing.
    """

    title: str
    line: str
    done_fraction: float
    best_ms: float | None
    lower_bound_ms: float | None
    elapsed_s: float
    limit_s: float
    gap_fraction: float | None = None


class Offer(Noun):
    """A file that can be saved: GET /files/NAME. title: what it is."""

    name: str
    title: str


class Studio(Noun):
    """The whole page. revision: of what is drawn; every action names it, so that two pages do not undo each other.

    report: the plan as it stands first, then what is pinned, by name; None while there is no job. differences: of the
    plan as it stands to each of `pins`, in their order. change: to the plan before the last action (its name is empty);
    None where that had no other plan. message: what to tell of the last action. undo, redo: what they would take back
    or do again, in words; None where nothing. commands: what the command line would be of all that led here, in order.
    search_revision: of the searched space (GET /space); None where none was searched. orders: what each stage runs, as
    texts, where the plan has an order of its own.
    """

    schema_name: str
    revision: int
    report: Report | None
    bound: Bound | None
    sizes: tuple[SizeChoices, ...]
    modes: dict[str, tuple[str, ...]]
    knobs: tuple[Knob, ...]
    pins: tuple[str, ...]
    message: str
    undo: str | None
    redo: str | None
    commands: tuple[str, ...]
    answers: tuple[Answer, ...]
    work: Work | None
    files: tuple[Offer, ...]
    search_revision: int | None
    differences: tuple[Difference, ...] = ()
    change: Difference | None = None
    orders: tuple[str, ...] = ()


class Status(Noun):
    """What a page asks for again and again (GET /status): whether it must draw anew, and how far the work is."""

    revision: int
    work: Work | None


class Space(Noun):
    """The searched space (GET /space)."""

    search_revision: int
    strategies: Strategies


class Catalog(Noun):
    """What a job can be made of (GET /catalog). configs: model files in the folder; launches: files there that start a
    training. exporters: frameworks that plans are written for."""

    devices: tuple[str, ...]
    models: tuple[str, ...]
    configs: tuple[str, ...]
    launches: tuple[str, ...]
    exporters: tuple[str, ...]


class Finding(Noun):
    """Something that a launch file breaks or wastes. line: from 1; None: the whole file. mend: the flag that mends it,
    empty where several could."""

    rule: str
    severity: Literal["error", "warning", "note"]
    line: int | None
    stage: int | None
    message: str
    mend: str


class Findings(Noun):
    """What `lint` found in a file, in its order."""

    file: str
    findings: tuple[Finding, ...]


# ------------------------------------------------------------------------------------------------------------ actions


class MoveLayers(Noun):
    """`count` layers of a modality from one virtual stage (chunk · PP + stage) to another; they keep their modes."""

    kind: Literal["move"]
    modality: Name
    source: Number
    target: Number
    count: Few


class SetMode(Noun):
    """So many layers of a modality on a virtual stage run in `mode`."""

    kind: Literal["mode"]
    modality: Name
    stage: Number
    mode: Name
    count: Number


class SetOrder(Noun):
    """A stage runs these actions one after another, such as `0F0 1F0 0B0`, where the plan has an order of its own."""

    kind: Literal["order"]
    stage: Number
    words: Annotated[str, Field(strict=True, min_length=1, max_length=100_000)]


class SetSizes(Noun):
    """Another strategy: these sizes, and of the lawful strategies that have them the one most like the present one."""

    kind: Literal["sizes"]
    sizes: Annotated[dict[Name, Value], Field(min_length=1, max_length=64)]


class SetKnobs(Noun):
    """The job with other values of these keys; None: as its file has it."""

    kind: Literal["knobs"]
    values: Annotated[dict[Name, Value | None], Field(min_length=1, max_length=20)]


class NewJob(Noun):
    """A job from a wizard. model: of the catalog, or a config in the folder. Left out: as `init` takes them."""

    kind: Literal["job"]
    model: Words
    device: Words
    num_nodes: Few
    devices_per_node: Few = 8
    global_batch_size: Few | Annotated[int, Field(strict=True, ge=1, le=10**9)]
    seq_length: Annotated[int, Field(strict=True, ge=1, le=10**9)]
    image_tokens_per_sample: Number = 0
    images_per_sample: Few = 1


class Launch(Noun):
    """A file of the folder that starts a training, and what it does not say itself: devices, tokens of a vocabulary."""

    file: Words
    device: Words
    world_size: Few | None = None
    vocab_size: Few | Annotated[int, Field(strict=True, ge=1, le=10**9)] | None = None


class ImportLaunch(Launch):
    """A job from a launch file, and the plan that it runs under."""

    kind: Literal["import"]


class ExportPlan(Noun):
    """The plan as it stands, as files of a framework below `out`. into: a launch file of the folder that it is written
    into; empty: new files. overwrite: files that are there may be replaced."""

    kind: Literal["export"]
    framework: Name
    into: Annotated[str, Field(strict=True, max_length=MAX_NAME)] = ""
    out: Words = "exported"
    overwrite: Flag = False


class Undo(Noun):
    """What was done last is taken back."""

    kind: Literal["undo"]


class Redo(Noun):
    """What was taken back last is done again."""

    kind: Literal["redo"]


class Pin(Noun):
    """The plan as it stands is kept beside the next ones, under this name."""

    kind: Literal["pin"]
    name: Words


class Unpin(Noun):
    """A pinned plan is put away."""

    kind: Literal["unpin"]
    name: Words


class Take(Noun):
    """A pinned plan becomes the one that is changed."""

    kind: Literal["take"]
    name: Words


Action = Annotated[
    MoveLayers
    | SetMode
    | SetOrder
    | SetSizes
    | SetKnobs
    | NewJob
    | ImportLaunch
    | ExportPlan
    | Undo
    | Redo
    | Pin
    | Unpin
    | Take,
    Field(discriminator="kind"),
]


class Do(Noun):
    """POST /do: an action on `revision`. Answered by the new Studio, packed as a report's page is (reports/page); with
    409 and the present Studio where another page was first; with 422 and a Failure where it cannot be done."""

    revision: Number
    action: Action


class Optimise(Noun):
    """POST /optimise: look for the best placement of the present strategy, or for the best plan of the whole space."""

    revision: Number
    scope: Literal["strategy", "space"]
    limit_s: Seconds = 60.0


class WhyNot(Noun):
    """POST /why-not: such as PP=8,TP=4; the answer comes into `answers`."""

    revision: Number
    wish: Words
    limit_s: Seconds = 30.0


class LintLaunch(Launch):
    """POST /lint: what a launch file breaks or wastes; answered by Findings, and the plan stays as it is."""


class Failure(Noun):
    """What is wrong, one paragraph."""

    error: str


class Spoken(Noun):
    """Everything that server and page say, for the schema alone."""

    report: Report
    studio: Studio
    status: Status
    space: Space
    catalog: Catalog
    do: Do
    optimise: Optimise
    why_not: WhyNot
    lint: LintLaunch
    findings: Findings
    failure: Failure
