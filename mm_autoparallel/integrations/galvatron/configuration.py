"""Upstream's search configuration: the YAML of `search_dist.py` under `search_engine:`, with overrides as Hydra's.

Defaults are upstream's (2.4.1). Keys that its schema has and no figure depends on are read over; keys that it does not
have are named in a note, because it drops them in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_there, read_document
from mm_autoparallel.integrations.galvatron.hardware import Hardware, read_hardware
from mm_autoparallel.integrations.galvatron.overrides import override, resolve
from mm_autoparallel.integrations.galvatron.profiles import ModelProfile, read_model
from mm_autoparallel.integrations.huggingface.hub_cache import find_config
from mm_autoparallel.records import MAX_LAYERS
from mm_autoparallel.validation import nearest, parse_record

WHAT = "Galvatron configuration"
MOST_SAMPLES, MOST_DEVICES = 1_000_000, 65_536
"""Assumed: a hundred times the largest batch and ten times the largest cluster seen."""
_MOST_BATCHES = 1_000
_Switch = Annotated[int, Field(ge=0, le=1)]
_Degree = Annotated[int, Field(ge=-1, le=MOST_DEVICES)]
_Batch = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
_Settled = Annotated[int, Field(ge=-1, le=MOST_SAMPLES)]
_Size = Annotated[int, Field(ge=1, le=10**9)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Profiling(_Section):
    """Where profiles lie, folders or files, and how figures are drawn from them."""

    time_profile_mode: Literal["static", "batch", "sequence"] = "static"
    memory_profile_mode: Literal["static", "sequence"] = "static"
    memory_profiling_path: str | None = None
    time_profiling_path: str | None = None
    allreduce_bandwidth_config_path: str | None = None
    p2p_bandwidth_config_path: str | None = None
    overlap_coe_path: str | None = None
    sp_time_path: str | None = None


class ModelInfo(_Section):
    """The model's sizes, or the file that has them."""

    model_config_path: str | None = None
    hf_model_name_or_path: str | None = None
    model_size: str | None = None
    model_name: str | None = None
    hidden_size: _Size | None = None
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    is_moe_model: bool = False


class CommonTrain(_Section):
    """Of training."""

    seq_length: _Size | None = None
    sequence_parallel: bool = True
    global_memory_buffer: bool = True


class Parallelism(_Section):
    """What all strategies share."""

    default_dp_type: Literal["ddp", "zero2"] = "ddp"
    pipeline_type: Literal["gpipe", "pipedream_flush"] = "gpipe"
    async_grad_reduce: bool = True
    mixed_precision: Literal["fp32", "fp16", "bf16"] = "bf16"


class HardwareInfo(_Section):
    """The cluster."""

    num_nodes: Annotated[int, Field(ge=1, le=MOST_DEVICES)] = 1
    num_gpus_per_node: Annotated[int, Field(ge=1, le=MOST_DEVICES)] = 8
    memory_constraint: Annotated[int, Field(ge=1, le=100_000)] = 24
    """GB of a device, of 1,024 MiB."""

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.num_nodes * self.num_gpus_per_node


class BatchSizes(_Section):
    """Batch sizes and numbers of micro-batches that are searched."""

    min_bsz: _Batch = 8
    max_bsz: _Batch = 8
    bsz_scale: _Batch = 8
    settle_bsz: _Settled = -1
    settle_chunk: _Settled = -1

    @property
    def batches(self) -> range:
        """Samples of a step, as upstream steps through them."""
        if self.settle_bsz > 0:
            return range(self.settle_bsz, self.settle_bsz + 1)
        return range(max(self.min_bsz, self.bsz_scale), self.max_bsz + 1, self.bsz_scale)


class SearchSpace(_Section):
    """What is left out, and the highest degrees."""

    disable_dp: _Switch = 0
    disable_tp: _Switch = 0
    disable_cp: _Switch = 1
    disable_sp: _Switch = 0
    disable_embedding_lmhead_tp: _Switch = 0
    disable_embedding_lmhead_sp: _Switch = 0
    disable_pp: _Switch = 0
    disable_ckpt: _Switch = 0
    disable_fsdp: _Switch = 0
    max_tp_deg: _Degree = 8
    max_pp_deg: _Degree = 8
    max_sp_deg: _Degree = 8
    max_cp_deg: _Degree = 8


class Options(_Section):
    """Of the search itself."""

    output_config_path: str | None = None
    fine_grained_mode: _Switch = 1


class Debug(_Section):
    """For trials."""

    debug_costmodel_coe: Annotated[float, Field(gt=1e-9, lt=1e9)] = 1.0


class Configuration(_Section):
    """What stands under `search_engine:`."""

    profiling_info: Profiling = Profiling()
    model_info: ModelInfo = ModelInfo()
    common_train_info: CommonTrain = CommonTrain()
    parallelism_info: Parallelism = Parallelism()
    hardware_info: HardwareInfo = HardwareInfo()
    batch_size_info: BatchSizes = BatchSizes()
    search_space_info: SearchSpace = SearchSpace()
    options_info: Options = Options()
    debug_info: Debug = Debug()


_READ_OVER = {
    "batch_size_info": {"recommend_min_bsz"},
    "options_info": {"parallel_search", "worker", "log_dir"},
}
"""Of upstream's schema, without a part in any figure. Of the model and of training it has some hundred more."""
_OPEN = ("model_info", "common_train_info", "parallelism_info")


@dataclass(frozen=True)
class Search:
    """A configuration as it was read: sizes filled in, profiles found and read."""

    path: Path
    configuration: Configuration
    model_name: str
    hidden_size: int
    num_layers: int
    seq_length: int
    hardware: Hardware
    profile: ModelProfile
    switched_off: tuple[str, ...] = ()
    """What is left out of the space, as the strategy's name says it."""
    notes: tuple[str, ...] = ()

    @property
    def out(self) -> Path:
        """The folder that upstream writes the strategy to."""
        named = self.configuration.options_info.output_config_path
        return self.path.parent / "configs" if named is None else _find(named, self.path.parent)

    @property
    def file_name(self) -> str:
        """Of the strategy, as upstream names it."""
        config = self.configuration
        hardware, settled = config.hardware_info, config.batch_size_info.settle_bsz
        return (
            f"galvatron_config_{self.model_name}_{hardware.num_nodes}nodes_{hardware.num_gpus_per_node}gpus_per_node_"
            f"{hardware.memory_constraint}GB_{config.parallelism_info.mixed_precision}"
            + (f"_bsz{settled}" if settled > 0 else "")
            + (f"_[{'_'.join(self.switched_off)}_off]" if self.switched_off else "")
            + ".json"
        )


def read_search(path: Path, overrides: Sequence[str]) -> Search:
    """The configuration at `path`, and the profiles that it names. Raises JobError that names file and key."""
    document = read_document(path, WHAT)
    for each in overrides:
        override(document, each)
    where = f"{WHAT} {path}"
    engine = document.get("search_engine")
    if not isinstance(engine, dict):
        raise JobError(
            "search_engine is missing; upstream's search_dist.yaml has all under it", where=where, key="search_engine"
        )
    engine = resolve(engine, document, where)
    configuration = parse_record(Configuration, engine, WHAT, path)
    check_configuration(configuration, where)
    sizes = _model_sizes(configuration.model_info, path)
    seq_length = configuration.common_train_info.seq_length
    for name, size in (*sizes.items(), ("seq_length", seq_length)):
        if size is None:
            section = "common_train_info" if name == "seq_length" else "model_info"
            raise JobError(f"{section}.{name} is missing", where=where, key=f"{section}.{name}")
    model_name, space = _model_name(configuration.model_info), configuration.search_space_info
    hardware, profile = read_profiles(configuration, path, [model_name], int(seq_length or 0))
    return Search(
        path,
        configuration,
        model_name,
        int(sizes["hidden_size"] or 0),
        int(sizes["num_layers"] or 0),
        int(seq_length or 0),
        hardware,
        profile,
        tuple(name for name in ("dp", "tp", "pp", "fsdp", "ckpt") if getattr(space, f"disable_{name}")),
        tuple(_unknown(engine)),
    )


def _unknown(engine: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each key that upstream drops."""
    for name, section in engine.items():
        field = Configuration.model_fields.get(name)
        if field is None:
            near = nearest(str(name), [*Configuration.model_fields])
            yield f"search_engine.{name} is no section{near}; it is left out"
        elif isinstance(section, dict) and name not in _OPEN:
            known = {*field.annotation.model_fields, *_READ_OVER.get(name, ())}  # type: ignore[union-attr]
            for key in section:
                if key not in known:
                    yield f"search_engine.{name}.{key} is not known{nearest(str(key), sorted(known))}; it is left out"


def check_configuration(configuration: Configuration, where: str) -> None:
    """Raises JobError for what is not searched here."""
    space, sizes = configuration.search_space_info, configuration.batch_size_info
    if not space.disable_cp:
        raise JobError(
            "search_space_info.disable_cp is 0; upstream's cost model does not count what context parallelism sends, "
            "and it is not searched here: 1 is expected",
            where=where,
            key="search_space_info.disable_cp",
        )
    if configuration.model_info.is_moe_model:
        raise JobError(
            "model_info.is_moe_model is true; upstream's search is of dense layers",
            where=where,
            key="model_info.is_moe_model",
        )
    if configuration.hardware_info.num_devices > MOST_DEVICES:
        raise JobError(f"hardware_info: more than {MOST_DEVICES} devices", where=where, key="hardware_info")
    if not 0 < len(sizes.batches) <= _MOST_BATCHES:
        raise JobError(
            f"batch_size_info gives {len(sizes.batches)} batch sizes; from 1 to {_MOST_BATCHES} are expected: min_bsz "
            "to max_bsz in steps of bsz_scale, bsz_scale the smallest",
            where=where,
            key="batch_size_info",
        )
    if sizes.settle_chunk == 0 or sizes.settle_bsz == 0:
        raise JobError("settle_bsz and settle_chunk are -1 or at least 1", where=where, key="batch_size_info")


# ------------------------------------------------------------------------------------------------------ model and files


def _model_name(model: ModelInfo) -> str:
    name = model.model_size or model.model_name or model.hf_model_name_or_path or "unknown"
    return name.rsplit("/", maxsplit=1)[-1]


def _model_sizes(model: ModelInfo, path: Path) -> dict[str, int | None]:
    """hidden_size and num_layers: as given, else of model_config_path, else of a Hugging Face config beside it."""
    sizes: dict[str, int | None] = {"hidden_size": model.hidden_size, "num_layers": model.num_layers}
    named = model.hf_model_name_or_path
    if model.model_config_path is not None and None in sizes.values():
        file = _find(model.model_config_path, path.parent)
        given = parse_record(ModelInfo, read_document(file, "Galvatron model file"), "Galvatron model file", file)
        sizes = {name: size or getattr(given, name) for name, size in sizes.items()}
        named = named or given.hf_model_name_or_path
    if named and None in sizes.values():
        folder = _find(named, path.parent)
        file = folder if folder.suffix == ".json" else folder / "config.json"
        file = file if is_there(file) else find_config(named) or file
        if not is_there(file):
            raise JobError(
                f"model_info.hf_model_name_or_path is {describe_value(named)}, which lies on no disk here; nothing is "
                "downloaded: give the folder that has its config.json, or hidden_size and num_layers",
                where=f"{WHAT} {path}",
                key="model_info.hf_model_name_or_path",
            )
        keys = {"hidden_size": ("hidden_size", "n_embd"), "num_layers": ("num_hidden_layers", "n_layer")}
        config = read_document(file, "Hugging Face config")
        found = {name: next((config[key] for key in keys[name] if key in config), None) for name in keys}
        given = parse_record(ModelInfo, found, "Hugging Face config", file)
        sizes = {name: size or getattr(given, name) for name, size in sizes.items()}
    return sizes


def _find(name: str, folder: Path) -> Path:
    """A path that a configuration names: below its own folder if it lies there, else from where the command runs, else
    from the folder above, where upstream's own configurations are run from."""
    path = Path(name).expanduser()
    places = [folder / path, path, folder.absolute().parent / path]
    return next((place for place in places if is_there(place)), places[0])


def read_profiles(
    configuration: Configuration, path: Path, models: Sequence[str], seq_length: int, is_older: bool = False
) -> tuple[Hardware, ModelProfile]:
    """The profiles that a configuration at `path` names. models: by which its files may be called; is_older: by the
    rules of 2.4.0. Raises JobError that names file and key."""
    profiling, hardware = configuration.profiling_info, configuration.hardware_info
    precision = configuration.parallelism_info.mixed_precision
    machines = f"{hardware.num_nodes}nodes_{hardware.num_gpus_per_node}gpus_per_node.json"
    of_machines = ("profile_hardware/hardware_configs", "hardware_configs")

    def at(key: str, names: Sequence[str], usual: Sequence[str]) -> Path:
        return _find_profile(getattr(profiling, key), names, usual, path, key)

    def of_model(kind: str) -> list[str]:
        ends = ("_all", "", f"_seqlen{seq_length}_all", f"_seqlen{seq_length}")
        return [f"{kind}_{precision}_{name}{end}.json" for name in models for end in ends]

    read = read_hardware(
        at("allreduce_bandwidth_config_path", [f"allreduce_bandwidth_{machines}"], of_machines),
        at("p2p_bandwidth_config_path", [f"p2p_bandwidth_{machines}"], of_machines),
        at("overlap_coe_path", ["overlap_coefficient.json"], of_machines),
        at("sp_time_path", [f"sp_time_{machines}"], of_machines),
        hardware.num_devices,
    )
    profile = read_model(
        at("time_profiling_path", of_model("computation_profiling"), ("configs",)),
        at("memory_profiling_path", of_model("memory_profiling"), ("configs",)),
        seq_length,
        profiling.time_profile_mode,
        profiling.memory_profile_mode,
        configuration.common_train_info.sequence_parallel,
        is_older,
    )
    return read, profile


def _find_profile(named: str | None, names: Sequence[str], usual: Sequence[str], path: Path, key: str) -> Path:
    """The first of the files `names` in the folder that the configuration names; it may name the file itself. Where it
    names none: in the usual folders, which lie beside the configuration or above it."""
    if named is not None:
        folder = _find(named, path.parent)
        if folder.suffix == ".json":
            return folder
        folders = [folder]
    else:
        above = [
            path.parent,
            *[path.absolute().parents[step] for step in range(1, 5) if step < len(path.absolute().parents)],
        ]
        folders = [each / inner for each in above for inner in usual]
    for folder in folders:
        for name in names:
            if is_there(folder / name):
                return folder / name
    places = "" if named is None else f" in {folders[0]}"
    raise JobError(
        f"profiling_info.{key}: there is no {' or '.join(names)}{places}; upstream's profiler writes it",
        where=f"{WHAT} {path}",
        key=f"profiling_info.{key}",
    )
