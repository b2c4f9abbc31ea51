"""fsdp2_config.yaml: how torch FSDP2 shards a model that Megatron's pretrain trains (--use-torch-fsdp2).

Read as MindSpeed-MM reads it (models/transformers/base_model.py, 2.3 to 26.1 and after): modules are named by their
paths, a list of layers by `{*}` or by numbers, `{0-20,22}`. A file that names classes is of 2.2, whose reader is
MindSpeed's own (core/distributed/torch_fully_sharded_data_parallel there): all layers of a class recompute, or none do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.mindspeed_mm.arguments import find_argument
from mm_autoparallel.integrations.mindspeed_mm_fsdp.module_patterns import find_layer_lists
from mm_autoparallel.model.job.model import Decoder, Modality, Model
from mm_autoparallel.model.readers.foreign import Section

CONFIG_PATH = "--fsdp2-config-path"
RESHARD, RECOMPUTE = "reshard_after_forward", "recompute_modules"
"""Keys that a plan decides."""

_WHAT = "FSDP2 configuration"
_BRACES = re.compile(r"\{[^{}]*\}")
_LAYER_CLASS = ".TransformerLayer"
_RECOMPUTED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "glm4v_moe")
"""model_id of models that wrap every layer for recompute before they are sharded (mindspeed_mm/models/transformers)."""

_MAX_PATTERNS = 200
"""Assumed: ten times the longest list known; each is held against every layer."""


@dataclass(frozen=True)
class Sharding:
    """What the file at `path` says. reshard: gathered weights are given up after the forward.

    all_or_none: what recomputes is no choice of single layers: True all of them, False none, None a choice. recompute,
    wrapped: patterns of modules. weight_bytes: of a gathered weight. notes: a sentence for what is counted otherwise.
    """

    path: Path
    reshard: bool
    all_or_none: bool | None
    recompute: tuple[str, ...]
    wrapped: tuple[str, ...]
    weight_bytes: float
    notes: tuple[str, ...] = ()

    def list_paths(self, model: Model) -> dict[str, str]:
        """modality → its list of layers, by the patterns of the file."""
        patterns = (_BRACES.sub("{*}", pattern) for pattern in (*self.wrapped, *self.recompute))
        return find_layer_lists(patterns, [modality.name for modality in model.modalities])

    def count_recomputed(self, modality: Modality, paths: Mapping[str, str]) -> int:
        """Layers of `modality` that recompute; none of those that keep nothing."""
        num_layers, path = modality.layers.num_layers, paths.get(modality.name)
        if not keeps(modality):
            return 0
        if self.all_or_none is not None:
            return num_layers if self.all_or_none else 0
        return len({i for pattern in self.recompute for i in _list_layers(pattern, path or "", num_layers)})


def keeps(modality: Modality) -> bool:
    """Whether its layers keep anything for a backward: those of frozen encoders do not."""
    return isinstance(modality, Decoder) or not modality.freeze


def find_sharding(
    arguments: Sequence[str], model_id: object, find: Callable[[str], Path], devices: int | None
) -> Sharding:
    """What the file says that `arguments` name behind --fsdp2-config-path.

    model_id: of the model's file, whose class may recompute every layer by itself. devices: that share the weights.
    Raises JobError where there is no such file, or where no plan can speak for what it asks for.
    """
    return read_sharding(find_config(arguments, find), model_id, devices)


def find_config(arguments: Sequence[str], find: Callable[[str], Path]) -> Path:
    """The file that `arguments` name. find: the path here of a path that they name. Raises JobError without one."""
    named = find_argument(arguments, CONFIG_PATH)
    if named is None:
        raise JobError(
            f"{CONFIG_PATH} is missing beside --use-torch-fsdp2: every device then keeps a whole copy of the weights, "
            "which is not planned; give a file with sharding_size: auto"
        )
    return find(named)


def read_sharding(path: Path, model_id: object, devices: int | None) -> Sharding:
    """As find_sharding, of the file at `path`."""
    top = Section(read_document(path, _WHAT), path, what=_WHAT)
    recompute, wrapped = _read_patterns(top, RECOMPUTE), _read_patterns(top, "sub_modules_to_wrap")
    by_class = any(pattern.endswith(_LAYER_CLASS) for pattern in (*recompute, *wrapped))
    _check_sharing(top, by_class, devices)
    if top.flag("offload_to_cpu", False):
        raise top.refuse("offload_to_cpu", "weights and optimizer on the host are not planned; false is expected")
    if top.count("expert_parallel_size", 1) > 1:
        raise top.refuse("expert_parallel_size", "experts dealt out beside FSDP2 are not planned; 1 is expected")
    all_or_none = None
    if model_id in _RECOMPUTED:
        all_or_none = True
    elif by_class:
        all_or_none = any(pattern.endswith(_LAYER_CLASS) for pattern in recompute)
    return Sharding(
        path=path,
        reshard=top.flag(RESHARD, True),
        all_or_none=all_or_none,
        recompute=recompute,
        wrapped=wrapped,
        weight_bytes=2.0 if top.text("param_dtype", "fp32") in ("bf16", "fp16") else 4.0,
        notes=tuple(_list_notes(top)),
    )


def _check_sharing(top: Section, by_class: bool, devices: int | None) -> None:
    size = top.content.get("sharding_size")
    if size == "auto" or (size is None and by_class) or (devices is not None and size == devices):
        return
    if size is None:
        raise JobError(
            f"{_WHAT} {top.path}: sharding_size is missing, and every device then keeps a whole copy of the weights, "
            "which is not planned; auto is expected"
        )
    raise top.refuse(
        "sharding_size", "copies of the weights that fewer devices share are not planned; auto is expected"
    )


def _list_notes(top: Section) -> list[str]:
    notes = []
    ignored = _read_patterns(top, "ignored_modules")
    if ignored:
        notes.append(
            f"ignored_modules names {', '.join(ignored)}, which lies whole on every device and is counted as sharded"
        )
    if top.text("reduce_dtype", "fp32") not in ("fp32", "float32"):
        notes.append("gradients are counted in fp32, as they are kept; reduce_dtype makes their traffic half of that")
    return notes


def _read_patterns(top: Section, key: str) -> tuple[str, ...]:
    value: Any = top.content.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > _MAX_PATTERNS:
        raise top.refuse(key, f"a list of names of modules is expected, at most {_MAX_PATTERNS}")
    return tuple(value)


def _list_layers(pattern: str, path: str, num_layers: int) -> set[int]:
    """Layers of the list at `path` that `pattern` names as a whole."""
    rest = pattern.removeprefix(f"{path}.")
    if not path or rest == pattern:
        return set()
    if rest == "{*}":
        return set(range(num_layers))
    named: set[int] = set()
    for part in re.sub(r"^\{(.*)\}$", r"\1", rest).split(","):
        found = re.fullmatch(r" *(\d{1,9}) *(?:- *(\d{1,9}) *)?", part)
        if not found:
            return set()
        named |= set(range(int(found[1]), min(int(found[2] or found[1]) + 1, num_layers)))
    return named
