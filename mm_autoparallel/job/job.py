"""Job: a model on a cluster with a workload, and the limits of the search; read from one YAML or JSON file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_folder, is_there, read_document
from mm_autoparallel.job.cluster import Cluster
from mm_autoparallel.job.devices import DEVICES
from mm_autoparallel.job.fact_law import fact_reasons
from mm_autoparallel.job.fields import Count, FailurePrice, FitProbability, Flag, Name, Noun, Number
from mm_autoparallel.job.hashing import OWN_SOURCE, hash_job
from mm_autoparallel.job.huggingface_generic import is_generic, trace_config, usual_mbs
from mm_autoparallel.job.huggingface_processor import with_image_tokens
from mm_autoparallel.job.layer_modes import LAYER_MODES, LayerMode, second_products_reason
from mm_autoparallel.job.model import Adapters, Model
from mm_autoparallel.job.model_file import parse_inline_model, read_model
from mm_autoparallel.job.precision import Precision
from mm_autoparallel.job.search_checks import check_search
from mm_autoparallel.job.sharding import ZERO_STAGES
from mm_autoparallel.job.stacks import Dispatcher, Graphs
from mm_autoparallel.job.strategy import DEFAULT_RANK_ORDER, RankOrder
from mm_autoparallel.job.traced_model import TracedModel
from mm_autoparallel.job.unstated import find_unstated
from mm_autoparallel.job.workload import ContextParallel, Overlap, Workload
from mm_autoparallel.schedules.catalog import OF_MICROBATCHES
from mm_autoparallel.validation import nearest, parse_record

USUAL_FAILURE_PRICE = 0.1
"""A start that runs out of memory costs a tenth of the run it was for (assumed). At this price no first pick of
published runs failed (docs/validation/fidelity.md)."""


class SearchSpace(Noun):
    """Limits of the search. Of pp, tp, cp, dp and mbs a missing list means every lawful value, of all else the usual.

    ep: expert parallel sizes. etp: ranks that share an expert (0: as TP). max_vpp: the most chunks a stage. zero: ZeRO
    stages to try. reshard: true, false or both, of ZeRO 3. shard: ranks that share one copy of its weights (0: all).
    cp_kind: how context parallel ranks share attention. optimizer_offload: whether the host keeps the optimizer's
    states. modes: in which a layer may run beside its own way (job/layer_modes.py), in the order in which the first
    layers of a stage (and chunk) take them. rank_order: which ranks have which part, by Megatron's names
    (job/strategy.py). sequence_parallel: with false among them also without it, where the workload has it. precision:
    those to try, in place of the workload's. schedule: nothing for each strategy's default. dispatcher, graphs,
    overlap_all_to_all: what experts' tokens are exchanged by, which CUDA graphs there are, what hides the exchange;
    nothing: as the workload has them (job/stacks.py).
    failure_price: what a start that runs out of memory costs, as a part of the run (search/caution.py; nothing: 0.1, or
    0 where fit_probability is given). fit_probability: plans that fit with less are left out. choice: robust weighs the
    best plans against what may be wrong with the rates that times stand on, point does not.
    """

    pp: tuple[Count, ...] | None = Field(None, min_length=1)
    tp: tuple[Count, ...] | None = Field(None, min_length=1)
    cp: tuple[Count, ...] | None = Field(None, min_length=1)
    dp: tuple[Count, ...] | None = Field(None, min_length=1)
    mbs: tuple[Count, ...] | None = Field(None, min_length=1)
    ep: tuple[Count, ...] = Field((1,), min_length=1)
    etp: tuple[Number, ...] = Field((0,), min_length=1)
    max_vpp: Count = 1
    zero: tuple[Number, ...] = Field((1,), min_length=1)
    reshard: tuple[Flag, ...] = Field((True,), min_length=1)
    shard: tuple[Number, ...] = Field((0,), min_length=1)
    cp_kind: tuple[ContextParallel, ...] | None = Field(None, min_length=1)
    optimizer_offload: tuple[Flag, ...] = Field((False,), min_length=1)
    modes: tuple[LayerMode, ...] = ("recompute",)
    schedule: str | None = None
    rank_order: tuple[RankOrder, ...] = Field((DEFAULT_RANK_ORDER,), min_length=1)
    sequence_parallel: tuple[Flag, ...] = Field((True,), min_length=1)
    dispatcher: tuple[Dispatcher, ...] | None = Field(None, min_length=1)
    graphs: tuple[Graphs, ...] | None = Field(None, min_length=1)
    overlap_all_to_all: tuple[Overlap, ...] | None = Field(None, min_length=1)
    precision: tuple[Precision, ...] | None = Field(None, min_length=1)
    failure_price: FailurePrice | None = None
    fit_probability: FitProbability | None = None
    choice: Literal["robust", "point"] = "robust"

    @property
    def price(self) -> float:
        """`failure_price`, or what stands for it."""
        if self.failure_price is not None:
            return self.failure_price
        return 0.0 if self.fit_probability is not None else USUAL_FAILURE_PRICE

    @field_validator("zero")
    @classmethod
    def _check_zero(cls, zero: tuple[int, ...]) -> tuple[int, ...]:
        for stage in zero:
            if stage not in ZERO_STAGES:
                raise ValueError(f"ZeRO {stage} is not understood; known are {', '.join(map(str, ZERO_STAGES))}")
        return zero

    @field_validator("modes")
    @classmethod
    def _check_modes(cls, modes: tuple[LayerMode, ...]) -> tuple[LayerMode, ...]:
        twice = next((mode for mode in modes if modes.count(mode) > 1), None)
        if twice:
            raise ValueError(f"{twice} stands there twice; layers take each mode once, in this order")
        return modes

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, schedule: str | None) -> str | None:
        if schedule is not None and schedule not in OF_MICROBATCHES:
            known = ", ".join(OF_MICROBATCHES)
            raise ValueError(f"{schedule!r} is no schedule{nearest(schedule, OF_MICROBATCHES)}; known are {known}")
        return schedule


class JobFile(Noun):
    """A job as it stands in its file. `freeze`: part → frozen or not, over what its model says (Model.with_freeze).
    adapters: what trains in place of the parts that are not frozen.

    calibration: the name of a shipped calibration, or a file beside the job's (profiles/calibration.py).
    """

    model: str | dict[str, Any]
    cluster: Cluster
    workload: Workload
    profiles: tuple[str, ...] = ()
    search: SearchSpace = SearchSpace()
    freeze: dict[str, Flag] = Field(default_factory=dict)
    adapters: Adapters | None = None
    calibration: Name | None = None


@dataclass(frozen=True)
class Job:
    """What is planned. `profiles`: folders of measured costs. `warnings`: what looks odd in it, a sentence each.

    calibration: name or path, from the folder of `path`, of what analytic times stand on; None: that of the device.

    unstated: keys that would state what decides a step and is not said (job/unstated.py).

    sha256: of the content of model, cluster and workload that has a say in any figure; names and sources have none.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    profiles: tuple[Path, ...]
    search: SearchSpace
    path: Path
    sha256: str
    warnings: tuple[str, ...] = ()
    calibration: str | None = None
    unstated: tuple[str, ...] = ()

    @property
    def asks_low(self) -> bool:
        """Whether any linear layer may multiply in less than BF16."""
        return asks_low(self.search, self.workload)

    def with_modes(self, used: Collection[str]) -> Job:
        """The job whose layers may run in the modes `used` too, behind those that its search allows."""
        more = tuple(mode for mode in LAYER_MODES if mode in used and mode not in self.search.modes)
        if not more:
            return self
        return replace(self, search=self.search.model_copy(update={"modes": (*self.search.modes, *more)}))


def read_job(path: Path) -> Job:
    """The job in the YAML or JSON file at `path`; files it names are looked up beside it.

    Raises JobError, one paragraph naming file, key, value and what would be right.
    """
    return parse_job(read_document(path, "job file"), path)


def parse_job(document: dict[str, Any], path: Path) -> Job:
    """The job of a job file's content. `path`: what messages call it, and beside it lie the files that it names.

    Raises JobError as read_job does.
    """
    document, read = with_image_tokens(document, path)
    job_file = parse_record(JobFile, _resolve_device(document, path), "job file", path)
    profiles = tuple(path.parent / profile for profile in job_file.profiles)
    model, traces = _read_model(job_file, path)
    if isinstance(model, TracedModel):
        job_file = _as_traced(job_file, path)
    try:
        model = model.with_freeze(job_file.freeze)
    except JobError as failure:
        raise JobError(f"job file {path}: {failure}") from None
    if isinstance(model, TracedModel):
        _check_remarks(model, job_file.workload, path)
    if job_file.adapters:
        if isinstance(model, TracedModel):
            raise JobError(
                f"job file {path}: adapters are planned for models that are described, and this one is traced"
            )
        adapted = model.model_dump() | {"adapters": job_file.adapters.model_dump()}
        model = parse_record(Model, adapted, "job file", path)
    _check_together(model, job_file, path)
    return Job(
        model=model,
        cluster=job_file.cluster,
        workload=job_file.workload,
        profiles=(*profiles, *traces),
        search=job_file.search,
        path=path,
        sha256=hash_job(model, job_file.cluster, job_file.workload),
        warnings=(*read, *_warnings(model, job_file.workload)),
        calibration=job_file.calibration,
        unstated=find_unstated(model, _model_document(job_file, path), job_file.freeze, job_file.workload),
    )


def _model_document(job_file: JobFile, path: Path) -> dict[str, Any]:
    """The model file's content, or the inline model."""
    named = job_file.model
    return read_document(path.parent / named, "model file") if isinstance(named, str) else named


def _read_model(job_file: JobFile, path: Path) -> tuple[Model, tuple[Path, ...]]:
    """The job's model, and the folder of traces that came with it where it is known from these alone."""
    named = job_file.model
    model_path = path.parent / named if isinstance(named, str) else path
    if isinstance(named, str) and not is_there(model_path):
        raise JobError(
            f"job file {path}: model names {describe_value(named)}, and there is no file so called beside it"
        )
    document = _model_document(job_file, path)
    if isinstance(named, str) and is_generic(document):
        workload, mbs = _as_traced(job_file, path).workload, job_file.search.mbs
        sizes = usual_mbs(mbs, workload.global_batch_size)
        traced = trace_config(document, model_path, workload, job_file.freeze, sizes)
        return traced.model, (traced.folder,)
    model = read_model(model_path) if isinstance(named, str) else parse_inline_model(named, path)
    beside = model_path.with_suffix("")
    return model, (beside,) if isinstance(model, TracedModel) and is_folder(beside) else ()


def _check_remarks(model: TracedModel, workload: Workload, path: Path) -> None:
    """Raises JobError where the workload has samples of what the model's class could not be run on."""
    given = {"images": workload.image_tokens_per_sample, "audios": workload.audio_tokens_per_sample}
    for media, tokens in given.items():
        remark = next((one for one in model.remarks if one.startswith(f"its {media} cannot be run")), None)
        if tokens and remark:
            raise JobError(
                f"job file {path}: workload.{media[:-1]}_tokens_per_sample is {tokens}, and of {model.name} {remark}; "
                "leave it out to plan its text alone, or trace your own code with `mm-autoparallel trace --model`"
            )


def _as_traced(job_file: JobFile, path: Path) -> JobFile:
    """`job_file` for a model known from traces: transformers' own code, and micro-batches that are traced.

    Raises JobError where it asks for what traces of whole layers do not tell.
    """
    workload, search = job_file.workload, job_file.search
    where = f"job file {path}: the model is known from traces of transformers' own code"
    if "implementation" not in workload.model_fields_set:
        given = workload.model_dump(include=workload.model_fields_set)
        workload = Workload.model_validate({**given, "implementation": "transformers"})
    elif workload.implementation != "transformers":
        raise JobError(f"{where}, and workload.implementation is {workload.implementation}; leave it out")
    if any(group.device not in (None, job_file.cluster.device) for group in job_file.cluster.node_groups):
        raise JobError(f"{where}, and cluster.node_groups has devices of several kinds; give one kind")
    by_operators = [mode for mode in search.modes if mode in ("selective", "activation")]
    if by_operators:
        raise JobError(
            f"{where}, and search.modes names {by_operators[0]}, which asks for parts of layers; leave it out"
        )
    mbs = usual_mbs(search.mbs, workload.global_batch_size)
    return job_file.model_copy(update={"workload": workload, "search": search.model_copy(update={"mbs": mbs})})


def _resolve_device(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """The document with the catalog's device in the place of its name, and under a mapping that is `based_on` one."""
    cluster = document.get("cluster")
    if not isinstance(cluster, dict):
        return document
    resolved = cluster | _with_device(cluster, "cluster", path)
    groups = cluster.get("node_groups")
    if isinstance(groups, list):
        resolved["node_groups"] = [
            group | _with_device(group, f"cluster.node_groups[{index}]", path) if isinstance(group, dict) else group
            for index, group in enumerate(groups)
        ]
    return document | {"cluster": resolved}


def _with_device(holder: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """`holder.device` with the catalog's figures in it; nothing where it does not ask for any."""
    device = holder.get("device")
    if isinstance(device, str):
        return {"device": _find_device(device, f"{key}.device", path)}
    if not isinstance(device, dict) or "based_on" not in device:
        return {}
    base = _find_device(device["based_on"], f"{key}.device.based_on", path)
    changed = {name: value for name, value in device.items() if name != "based_on"}
    sources = base["sources"] | {name: OWN_SOURCE for name in changed if name in base["sources"]}
    return {"device": base | {"sources": sources} | changed}


def _find_device(name: object, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(name, str) or name not in DEVICES:
        hint = nearest(name, list(DEVICES)) if isinstance(name, str) else ""
        raise JobError(
            f"job file {path}: {key} is {describe_value(name)}, which is not in the catalog{hint}; known are "
            f"{', '.join(DEVICES)}, or give a mapping with a device's figures"
        )
    return DEVICES[name].model_dump()


def _check_together(model: Model, job_file: JobFile, path: Path) -> None:
    """What no part of a job can see alone."""
    workload = job_file.workload
    media = {encoder.media for encoder in model.encoders}
    for key, tokens, kind in (
        ("image_tokens_per_sample", workload.image_tokens_per_sample, "images"),
        ("audio_tokens_per_sample", workload.audio_tokens_per_sample, "audios"),
    ):
        if tokens and kind not in media:
            raise JobError(
                f"job file {path}: workload.{key} is {tokens}, and the model has no encoder of {kind}; leave it out"
            )
    names = [modality.name for modality in model.modalities]
    for name in workload.micro_batch_scale:
        if name not in names:
            raise JobError(
                f"job file {path}: workload.micro_batch_scale.{name} names no modality of the model"
                f"{nearest(name, names)}; known are {', '.join(names)}"
            )
    has_experts = any(modality.layers.experts for modality in model.modalities)
    for key in ("expert_imbalance_factor", "overlap_all_to_all"):
        value = getattr(workload, key)
        if not has_experts and value != Workload.model_fields[key].default:
            raise JobError(f"job file {path}: workload.{key} is {value}, and the model has no experts; leave it out")
    kinds = job_file.search.cp_kind or (workload.context_parallel,)
    if workload.dealing_ranks and "hierarchical" not in kinds:
        raise JobError(
            f"job file {path}: workload.dealing_ranks is {workload.dealing_ranks}, a choice of hierarchical context "
            f"parallelism, and the job has {', '.join(kinds)}; leave it out, or name hierarchical in "
            "workload.context_parallel or search.cp_kind"
        )
    reason = second_products_reason(model, workload)
    if reason:
        raise JobError(f"job file {path}: workload: {reason}; leave it out")
    check_search(job_file.search, job_file.workload, job_file.cluster.device, path, has_experts)
    _check_facts(model, job_file, path)


def _check_facts(model: Model, job_file: JobFile, path: Path) -> None:
    """Raises JobError where what the workload states of its run contradicts the model or itself."""
    layers = [] if isinstance(model, TracedModel) else [modality.layers for modality in model.modalities]
    experts = [of.experts for of in layers if of.experts]
    reasons = fact_reasons(
        job_file.workload,
        has_experts=bool(experts),
        has_shared=any(one.shared_ffn_size for one in experts),
        has_latent=any(of.latent for of in layers),
        asks_low=asks_low(job_file.search, job_file.workload),
    )
    for reason in reasons:
        raise JobError(f"job file {path}: workload: {reason}; leave it out or mend it")


def asks_low(search: SearchSpace, workload: Workload) -> bool:
    """Whether linear layers of the decoder may multiply in less than BF16."""
    return any(precision != "bf16" for precision in search.precision or (workload.precision,))


def _warnings(model: Model, workload: Workload) -> list[str]:
    remarks = [f"{model.name}: {remark}" for remark in model.remarks] if isinstance(model, TracedModel) else []
    given = {"images": workload.image_tokens_per_sample, "audios": workload.audio_tokens_per_sample}
    keys = {"images": "image_tokens_per_sample", "audios": "audio_tokens_per_sample"}
    return remarks + [
        f"the model encodes {encoder.media} ({encoder.name}) and workload.{keys[encoder.media]} is 0, so that part "
        "counts as idle"
        for encoder in model.encoders
        if encoder.media in given and not given[encoder.media]
    ]
