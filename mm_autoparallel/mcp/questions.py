"""What the tools are asked: strict records, whose schemas clients see. Paths are relative to the folder served."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mm_autoparallel.api import EXPLAIN_LIMIT_S
from mm_autoparallel.model.job.layer_modes import LayerMode
from mm_autoparallel.planner.plan import RESULT_FILE
from mm_autoparallel.planner.search import DEFAULT_TIME_LIMIT_S
from mm_autoparallel.records import Count, Few, Flag, Name, Noun, Number

MAX_PATH = 500
"""Characters of a path. Assumed: far more than a project's folders need."""
MAX_TIME_LIMIT_S = 3600.0
"""Of one search. Assumed: clients give up long before."""
MAX_PLANS = 8
"""Plans beside each other in one call. Assumed."""
MAX_LAUNCHES = 100
"""Launch files that one call looks at. Assumed: each takes a second or less."""
MAX_EDITS = 1_000
"""Moves, or modes of stages, in one call. Assumed: a stage each, of more stages than anybody has."""
MAX_CHANGES = 50
"""Keys of a job that one call changes. Assumed."""

PathName = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_PATH)]
TimeLimit = Annotated[float, Field(strict=True, gt=0, le=MAX_TIME_LIMIT_S, allow_inf_nan=False)]
Row = Annotated[list[Number | list[Number]], Field(max_length=1_000)]
Wish = Annotated[str, Field(strict=True, min_length=1, max_length=200)]
Rows = Annotated[dict[Name, Row], Field(max_length=20)]

_JOB = "job file (YAML or JSON: model, cluster, workload, search)"
_PLAN = "plan file, as `plan` and `edit` write it"
_OVERWRITE = "replace the file that `out` names, if it is there; without it that file stays and the call is refused"


class OfJob(Noun):
    """About a job."""

    job: PathName = Field(description=_JOB)
    changes: Annotated[dict[Name, Any], Field(max_length=MAX_CHANGES)] = Field(
        default_factory=dict,
        description="what if: other values of keys of the job, whose file stays as it is, such as "
        '{"cluster.num_nodes": 4}',
    )


class OfPlan(OfJob):
    """About a plan of a job."""

    plan: PathName = Field(description=_PLAN)


class PlanQuestion(OfJob):
    """Arguments of `plan`."""

    out: PathName = Field(RESULT_FILE, description="plan file to write (.json)")
    overwrite: Flag = Field(False, description=_OVERWRITE)
    time_limit_s: TimeLimit = Field(DEFAULT_TIME_LIMIT_S, description="seconds after which the best so far is answered")
    top_k: Annotated[int, Field(strict=True, ge=1, le=20)] = Field(1, description="how many of the best plans to name")


class SimulateQuestion(OfPlan):
    """Arguments of `simulate`."""

    out: PathName | None = Field(None, description="file for all figures (.json): times and memory by cause")
    overwrite: Flag = Field(False, description=_OVERWRITE)


class Move(Noun):
    """Layers that go from one stage to another, with their modes; those in none go first."""

    part: Name = Field("text", description="part of the model whose layers move, such as text or vision")
    layers: Few = Field(description="how many layers move")
    from_stage: Number = Field(description="stage that gives them, from 0 (with chunks: chunk * PP + stage)")
    to_stage: Number = Field(description="stage that takes them, likewise")


class StageMode(Noun):
    """How many layers of a stage run in a mode."""

    part: Name = Field("text", description="part of the model, such as text or vision")
    stage: Number = Field(description="stage, from 0 (with chunks: chunk * PP + stage)")
    mode: LayerMode = Field("recompute", description="what they do to keep less until their backward")
    layers: Number = Field(description="how many layers of the stage run in it")


class EditQuestion(OfPlan):
    """Arguments of `edit`. Changes are made in the order: sizes, whole lists, moves, modes."""

    out: PathName = Field(description="plan file to write (.json); may be the same file, with overwrite")
    overwrite: Flag = Field(False, description=_OVERWRITE)
    sizes: Wish | None = Field(
        None, description="take the strategy with these sizes that is most like the plan's, placed at once: PP=8,TP=4"
    )
    layers: Rows | None = Field(None, description="whole lists: part → layers of each stage, or [chunk][stage]")
    recompute: Rows | None = Field(None, description="whole lists: part → layers of each stage that recompute")
    moves: Annotated[list[Move], Field(max_length=MAX_EDITS)] = Field(
        default_factory=list, description="layers that go from one stage to another, in this order"
    )
    modes: Annotated[list[StageMode], Field(max_length=MAX_EDITS)] = Field(
        default_factory=list, description="how many layers of a stage recompute, or run in another mode"
    )


class ExplainQuestion(OfPlan):
    """Arguments of `explain`."""

    against: Annotated[list[PathName], Field(max_length=MAX_PLANS)] = Field(
        default_factory=list, description="further plan files that it is held against"
    )
    top_k: Annotated[int, Field(strict=True, ge=1, le=20)] | None = Field(
        None, description="hold it against so many of the best plans of a search too"
    )
    time_limit_s: TimeLimit = Field(EXPLAIN_LIMIT_S, description="seconds for each search that this needs")
    out: PathName | None = Field(None, description="file for the whole explanation (.json)")
    overwrite: Flag = Field(False, description=_OVERWRITE)


class WhyNotQuestion(OfPlan):
    """Arguments of `why_not`."""

    wish: Wish = Field(description="sizes of a strategy, such as PP=8 or PP=8,TP=4")
    time_limit_s: TimeLimit = Field(EXPLAIN_LIMIT_S, description="seconds for each search that this needs")
    out: PathName | None = Field(None, description="file for the whole explanation (.json)")
    overwrite: Flag = Field(False, description=_OVERWRITE)


class ReportQuestion(OfJob):
    """Arguments of `report`."""

    plans: Annotated[list[PathName], Field(max_length=MAX_PLANS)] = Field(
        default_factory=list, description="plan files to show, the first held against the others; none: the best plan"
    )
    search: Flag = Field(True, description="search the space too, and show every strategy and the best plan")
    time_limit_s: TimeLimit = Field(DEFAULT_TIME_LIMIT_S, description="seconds for that search")
    out: PathName = Field("plan.html", description="page to write (.html); it opens from disk")
    overwrite: Flag = Field(False, description=_OVERWRITE)


class InitQuestion(Noun):
    """Arguments of `init`."""

    model: PathName = Field(
        description="a Hugging Face config.json or its folder, another model file, or the name of a published model"
    )
    device: Name = Field(description="device of the cluster, by its name in the catalog, such as h100-80g")
    num_nodes: Few = Field(1, description="nodes of the cluster")
    devices_per_node: Few | None = Field(None, description="devices of each node (8 where left out)")
    global_batch_size: Count = Field(description="samples of a step, over all replicas")
    seq_length: Count = Field(description="tokens of a sample in the text decoder, those of images included")
    image_tokens_per_sample: Number | None = Field(None, description="of them, what a sample's images occupy")
    images_per_sample: Count | None = Field(None, description="images of a sample")
    more: Annotated[dict[Name, Any], Field(max_length=20)] = Field(
        default_factory=dict,
        description='further keys of the job file\'s sections, such as {"search": {"tp": [1, 2, 4]}}; sections are '
        "cluster, workload, search, freeze, adapters, profiles, calibration",
    )
    out: PathName = Field("job.yaml", description="job file to write (.yaml)")
    overwrite: Flag = Field(False, description=_OVERWRITE)


class PlaceQuestion(Noun):
    """Arguments of `place`."""

    problem: PathName = Field(description="problem file (JSON): a pipeline's stages, blocks, times and memory")
    time_limit_s: TimeLimit = Field(DEFAULT_TIME_LIMIT_S, description="seconds after which the best so far is answered")
    out: PathName | None = Field(None, description="certificate to write (.json), which `verify` checks")
    overwrite: Flag = Field(False, description=_OVERWRITE)


class VerifyQuestion(Noun):
    """Arguments of `verify`."""

    certificate: PathName = Field(description="certificate file that `place` wrote")
    time_limit_s: TimeLimit = Field(DEFAULT_TIME_LIMIT_S, description="seconds after which the bound is given up")


class ExportQuestion(Noun):
    """Arguments of `export_plan`."""

    plan: PathName = Field(description=_PLAN)
    framework: Name = Field(description="framework that trains under it, by its name, such as megatron-core")
    job: PathName | None = Field(None, description="its job file; without it the plan's file alone is checked")
    into: Annotated[list[PathName], Field(max_length=MAX_PLANS)] = Field(
        default_factory=list, description="own launch files that the plan is written into; none: new files are written"
    )
    target_version: Name | None = Field(None, description="version of the framework; none: the newest known")
    out: PathName | None = Field(
        None, description="folder to write to (exported where left out; of `into` the files themselves)"
    )
    overwrite: Flag = Field(False, description="replace files that are there; needed to change those of `into`")


class OfLaunch(Noun):
    """What a person says beside launch files."""

    framework: Name | None = Field(None, description="their framework; none: told by the file")
    world_size: Count | None = Field(None, description="devices, where only the machine knows")
    model: PathName | None = Field(None, description="the model's own file, where the launch does not say it")
    vocab_size: Count | None = Field(None, description="tokens of the vocabulary, where the tokenizer alone says it")
    seq_length: Count | None = Field(None, description="tokens of a sample, where no file says it")
    global_batch_size: Count | None = Field(None, description="samples of a step, where no file says it")
    micro_batch_size: Count | None = Field(None, description="samples of a micro-batch, where no file says it")
    image_tokens: Number | None = Field(None, description="text tokens of a sample's images")
    images: Count | None = Field(None, description="images of a sample")


class ImportQuestion(OfLaunch):
    """Arguments of `import_launch`."""

    file: PathName = Field(description="launch script or configuration")
    beside: Annotated[list[PathName], Field(max_length=MAX_PLANS)] = Field(
        default_factory=list, description="further files of the same training"
    )
    device: Name = Field(description="device of the cluster, by its name in the catalog, such as h100-80g")
    out: PathName = Field("imported", description="folder for job.yaml and plan.json; neither may be there")


class LintQuestion(OfLaunch):
    """Arguments of `lint`."""

    files: Annotated[list[PathName], Field(min_length=1, max_length=MAX_LAUNCHES)] = Field(
        description="launch scripts or configurations"
    )
    device: Name | None = Field(None, description="device of the cluster; without it memory and time are not looked at")
    ignore: Annotated[list[Name], Field(max_length=MAX_CHANGES)] = Field(
        default_factory=list, description="rules that are left out"
    )
    out: PathName | None = Field(None, description="file for all findings (.json)")
    sarif: Flag = Field(False, description="write `out` as SARIF 2.1.0")
    overwrite: Flag = Field(False, description=_OVERWRITE)


class NoQuestion(Noun):
    """No arguments."""


class StopQuestion(Noun):
    """Arguments of `stop`."""

    number: Count | None = Field(None, description="the call to stop, by its number in `status`; none: all that run")
