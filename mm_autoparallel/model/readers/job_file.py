"""A job's file read: one YAML or JSON file with model, cluster, workload and the limits of the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value, is_folder, is_there, read_document, read_text
from mm_autoparallel.model.job.arrangement_law import model_reason
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.fact_law import fact_reasons
from mm_autoparallel.model.job.hashing import OWN_SOURCE, hash_job
from mm_autoparallel.model.job.job import Job, SearchSpace, asks_low
from mm_autoparallel.model.job.layer_modes import second_products_reason
from mm_autoparallel.model.job.layout_limits import warn_of_search
from mm_autoparallel.model.job.model import Adapters, Model
from mm_autoparallel.model.job.schedule_law import is_order_file
from mm_autoparallel.model.job.search_checks import check_cached, check_search
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.job.unstated import find_unstated
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.model_file import find_form, parse_inline_model, read_model
from mm_autoparallel.model.readers.model_form import usual_mbs
from mm_autoparallel.model.readers.sample_source import fill_samples
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, read_csv
from mm_autoparallel.records import Flag, Name, Noun
from mm_autoparallel.validation import nearest, parse_record


def read_orders_beside(search: SearchSpace, workload: Workload, path: Path) -> tuple[str, ...]:
    """A text for each stage of the order whose file, beside the job file at `path`, search.schedule names; nothing
    where it names none. Raises JobError where the file is missing or wrong, or the search has no such sizes."""
    name = next(filter(is_order_file, search.schedule or ()), None)
    if name is None:
        return ()
    where = f"job file {path}: search.schedule names {name}"
    if not is_there(path.parent / name):
        raise JobError("there is no file so called beside it", where=where)
    try:
        orders = read_csv(read_text(path.parent / name, "schedule", "CSV", PlanError))
    except PlanError as error:
        raise JobError(str(error), where=where) from None
    if reason := _size_reason(orders, search, workload):
        raise JobError(reason, where=where)
    return orders.texts


def _size_reason(orders: Orders, search: SearchSpace, workload: Workload) -> str:
    """Why no strategy of the search can run these orders; empty where one may."""
    pp, vpp, batch = len(orders.stages), orders.num_chunks, workload.global_batch_size
    if orders.v_shaped:
        return "it runs through the stages and back, and a V-shaped order is planned by its schedule's name alone"
    if search.pp is not None and pp not in search.pp:
        return f"it has {pp} rows, one for each stage, and search.pp is {list(search.pp)}"
    if vpp > search.max_vpp:
        return f"it runs {vpp} chunks a stage, and search.max_vpp is {search.max_vpp}"
    if batch % orders.num_microbatches:
        return f"it runs {orders.num_microbatches} micro-batches, which do not divide global_batch_size {batch}"
    return ""


class JobFile(Noun):
    """A job as it stands in its file. `freeze`: part → frozen or not, over what its model says (Model.with_freeze).
    adapters: what trains in place of the parts that are not frozen.

    calibration: the name of a shipped calibration, or a file beside the job's (model/profiles/calibration.py).
    """

    model: str | dict[str, Any]
    cluster: Cluster
    workload: Workload
    profiles: tuple[str, ...] = ()
    search: SearchSpace = SearchSpace()
    freeze: dict[str, Flag] = Field(default_factory=dict)
    adapters: Adapters | None = None
    calibration: Name | None = None


def read_job(path: Path) -> Job:
    """The job in the YAML or JSON file at `path`; files it names are looked up beside it.

    Raises JobError, one paragraph naming file, key, value and what would be right.
    """
    return parse_job(read_document(path, "job file"), path)


def parse_job(document: dict[str, Any], path: Path) -> Job:
    """The job of a job file's content. `path`: what messages call it, and beside it lie the files that it names.

    Raises JobError as read_job does.
    """
    document, read = _fill_job(document, path)
    document, samples = fill_samples(document, path)
    job_file = parse_record(JobFile, _resolve_device(document, path), "job file", path)
    profiles = tuple(path.parent / profile for profile in job_file.profiles)
    model, traces = _read_model(job_file, path)
    if isinstance(model, TracedModel):
        job_file = _as_traced(job_file, path)
    try:
        model = model.with_freeze(job_file.freeze)
    except JobError as failure:
        raise JobError(str(failure), where=f"job file {path}") from None
    if isinstance(model, TracedModel):
        _check_remarks(model, job_file.workload, path)
    if job_file.adapters:
        if isinstance(model, TracedModel):
            raise JobError(
                "adapters are planned for models that are described, and this one is traced", where=f"job file {path}"
            )
        adapted = model.model_dump() | {"adapters": job_file.adapters.model_dump()}
        model = parse_record(Model, adapted, "job file", path)
    _check_together(model, job_file, path)
    told = warn_of_search(model, job_file.cluster, job_file.workload, job_file.search, path)
    return Job(
        model=model,
        cluster=job_file.cluster,
        workload=job_file.workload,
        profiles=(*profiles, *traces),
        search=job_file.search,
        path=path,
        sha256=hash_job(model, job_file.cluster, job_file.workload),
        warnings=(*read, *_warnings(model, job_file.workload), *told),
        calibration=job_file.calibration,
        unstated=find_unstated(model, _model_document(job_file, path), job_file.freeze, job_file.workload),
        samples=samples,
        orders=read_orders_beside(job_file.search, job_file.workload, path),
    )


def _fill_job(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The job's content with what files beside its model's say, and a sentence for what was read or is left out."""
    named, what = document.get("model"), f"job file {path}"
    if isinstance(named, str) and is_there(path.parent / named):
        what = f"model file {path.parent / named}"
        named = read_document(path.parent / named, "model file")
    if not isinstance(named, dict):
        return document, ()
    form = find_form(named, what)
    return form.given.fill_job(document, path) if form and form.given.fill_job else (document, ())


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
            f"model names {describe_value(named)}, and there is no file so called beside it", where=f"job file {path}"
        )
    document = _model_document(job_file, path)
    form = find_form(document, f"model file {model_path}") if isinstance(named, str) else None
    undescribed = form.given.undescribed if form else None
    if undescribed and undescribed.is_one(document):
        workload, mbs = _as_traced(job_file, path).workload, job_file.search.mbs
        sizes = usual_mbs(mbs, workload.global_batch_size)
        traced = undescribed.trace(document, model_path, workload, job_file.freeze, sizes)
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
                f"workload.{media[:-1]}_tokens_per_sample is {tokens}, and of {model.name} {remark}; "
                "leave it out to plan its text alone, or trace your own code with `mm-autoparallel trace --model`",
                where=f"job file {path}",
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
            f"{key} is {describe_value(name)}, which is not in the catalog{hint}; known are "
            f"{', '.join(DEVICES)}, or give a mapping with a device's figures",
            where=f"job file {path}",
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
                f"workload.{key} is {tokens}, and the model has no encoder of {kind}; leave it out",
                where=f"job file {path}",
            )
    names = [modality.name for modality in model.modalities]
    for name in workload.micro_batch_scale:
        if name not in names:
            raise JobError(
                f"workload.micro_batch_scale.{name} names no modality of the model"
                f"{nearest(name, names)}; known are {', '.join(names)}",
                where=f"job file {path}",
            )
    _check_own_tokens(model, workload, path)
    _check_packing(model, workload, path)
    has_experts = any(modality.layers.experts for modality in model.modalities)
    for key in ("expert_imbalance_factor", "overlap_all_to_all", "ep_kind"):
        value = getattr(workload, key)
        if not has_experts and value != Workload.model_fields[key].default:
            raise JobError(
                f"workload.{key} is {value}, and the model has no experts; leave it out", where=f"job file {path}"
            )
    if job_file.search.objective is not None and workload.samples is None:
        raise JobError(
            f"search.objective is {job_file.search.objective}, of steps over drawn batches, and workload.samples does "
            "not say what samples are like; give it, or leave the objective out",
            where=f"job file {path}",
        )
    kinds = job_file.search.cp_kind or (workload.context_parallel,)
    if workload.dealing_ranks and "hierarchical" not in kinds:
        raise JobError(
            f"workload.dealing_ranks is {workload.dealing_ranks}, a choice of hierarchical context "
            f"parallelism, and the job has {', '.join(kinds)}; leave it out, or name hierarchical in "
            "workload.context_parallel or search.cp_kind",
            where=f"job file {path}",
        )
    reason = second_products_reason(model, workload)
    if reason:
        raise JobError(f"workload: {reason}; leave it out", where=f"job file {path}")
    beside = [kind for kind in job_file.search.layouts if kind != "chain"] if job_file.search.layouts != "all" else []
    reason = model_reason(model, job_file.cluster, workload) if beside else None
    if reason:
        raise JobError(
            f"search.layouts names {beside[0]}, and there is none: {reason}; chain would do", where=f"job file {path}"
        )
    check_search(job_file.search, workload, job_file.cluster, path, has_experts)
    check_cached(model, job_file.cluster, workload, path)
    _check_facts(model, job_file, path)


def _check_packing(model: Model, workload: Workload, path: Path) -> None:
    whole = isinstance(model, TracedModel) or model.text.images is not None
    if workload.samples_per_sequence > 1 and whole:
        raise JobError(
            f"workload.samples_per_sequence is {workload.samples_per_sequence}, and the model is "
            f"{'known from traces of whole sequences' if isinstance(model, TracedModel) else 'of images alone'}; leave "
            "it out",
            where=f"job file {path}",
        )


def _check_own_tokens(model: Model, workload: Workload, path: Path) -> None:
    """Raises JobError where encoder_tokens_per_sample does not part the tokens of a medium among all its encoders."""
    given, where = workload.encoder_tokens_per_sample, f"job file {path}"
    key = "workload.encoder_tokens_per_sample"
    names = [encoder.name for encoder in model.encoders]
    for name in given:
        if name not in names:
            known = ", ".join(names) or "none"
            raise JobError(f"{key}.{name} names no encoder{nearest(name, names)}; known are {known}", where=where)
    if given and isinstance(model, TracedModel):
        raise JobError(f"{key} is given, and {model.name} is known from traces alone; leave it out", where=where)
    for medium, media in (("image", "images"), ("audio", "audios")):
        own = model.encoders_of(media)
        told = [name for name in own if name in given]
        total, least = getattr(workload, f"{medium}_tokens_per_sample"), getattr(workload, f"{media}_per_sample")
        if not told:
            continue
        if len(own) == 1:
            raise JobError(
                f"{key} names {own[0]}, the only encoder of {media}, whose tokens are {medium}_tokens_per_sample; "
                "leave it out",
                where=where,
            )
        if told != list(own):
            missing = ", ".join(name for name in own if name not in given)
            raise JobError(
                f"{key} names {', '.join(told)} and not {missing}; name all encoders of {media}", where=where
            )
        if sum(given[name] for name in own) != total:
            parts = " + ".join(str(given[name]) for name in own)
            raise JobError(
                f"{key} makes {parts} = {sum(given[name] for name in own)} tokens of {media}, and "
                f"workload.{medium}_tokens_per_sample, which has them all, is {total}",
                where=where,
            )
        few = next((name for name in own if given[name] < least), None)
        if few:
            raise JobError(f"{key}.{few} is {given[few]}, fewer than {media}_per_sample, {least}", where=where)


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
        raise JobError(f"workload: {reason}; leave it out or mend it", where=f"job file {path}")


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
