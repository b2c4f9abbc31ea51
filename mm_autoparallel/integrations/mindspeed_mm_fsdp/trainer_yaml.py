"""The one YAML of MindSpeed-MM's FSDP trainer, or of MindSpeed-LLM's, as far as a plan has a say in it or needs it.

Read as the trainer reads it (mindspeed_mm/fsdp/params, 26.0 to 26.1 and after): a key that it does not know is kept and
decides nothing. Recompute, offload and chunked loss stand under `features` from 26.1 on, before under `parallel` and
`model`; where they stand in the place of another release they are ignored, which `Trainer.ignored` tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_there, read_document
from mm_autoparallel.integrations.mindspeed_mm_fsdp import llm_yaml
from mm_autoparallel.integrations.yaml_text import KeyPath
from mm_autoparallel.model.readers.foreign import Section

WHAT = "trainer YAML"
_FEATURES_CODE = Path("mindspeed_mm/fsdp/params/feature_args.py")
"""In a checkout whose trainer reads `features`."""

_CODE = Path("mindspeed_mm/fsdp/params/parallel_args.py")


_MAX_PATTERNS = 200
"""Assumed: ten times the longest list known; each is held against every layer."""


@dataclass(frozen=True)
class Layout:
    """Where a release keeps what makes layers keep less, and the loss in pieces. offload_switch: () where it has none:

    layers are then offloaded where the plan names them. of_llm: the file is MindSpeed-LLM's, whose ranks all share one
    copy.
    """

    recompute: KeyPath
    recompute_modules: KeyPath
    offload_switch: KeyPath
    offload_modules: KeyPath
    chunk_loss: KeyPath
    sums_copies_once: bool
    of_llm: bool = False


FEATURES = Layout(
    ("features", "recompute"),
    ("features", "recompute_plan", "apply_modules"),
    ("features", "enable_activation_offload"),
    ("features", "activation_offload_plan", "apply_modules"),
    ("features",),
    sums_copies_once=True,
)
"""26.1 on."""

SCATTERED = Layout(
    ("parallel", "recompute"),
    ("parallel", "recompute_plan", "apply_modules"),
    (),
    ("model", "activation_offload_plan", "apply_modules"),
    ("model",),
    sums_copies_once=False,
)
"""26.0."""

OF_LLM = replace(SCATTERED, of_llm=True)
"""Of MindSpeed-LLM's trainer, once its keys are translated."""


@dataclass(frozen=True)
class Trainer:
    """What the YAML at `path` trains with. Numbers are those of the trainer where the file leaves them out.

    shard: fully_shard_parallel_size (0: all ranks). accumulation: micro-batches of a step. recompute, offload: patterns
    of modules, empty where switched off. loss_chunk_tokens: 0 where the loss is whole. ignored: keys that would decide
    something in another release. document: the whole file.
    """

    path: Path
    document: Mapping[str, Any]
    layout: Layout
    shard: int
    ulysses: int
    ring: int
    ep: int
    expert_shard: int
    reshard: bool
    mbs: int
    accumulation: int
    recompute: tuple[str, ...]
    offload: tuple[str, ...]
    loss_chunk_tokens: int
    expert_modules: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    @property
    def cp(self) -> int:
        """Ranks that share a sequence."""
        return self.ulysses * self.ring

    def section(self, *keys: str) -> Section:
        """The mapping under `keys`, empty where it is missing. Raises JobError where something else stands there."""
        found = Section(self.document, self.path, what=WHAT)
        for key in keys:
            found = found.section(key, {})
        return found


def read_trainer(path: Path, checkout: Path | None = None, text_path: Path | None = None) -> Trainer:
    """The trainer's YAML at `path`. checkout: of MindSpeed-MM, whose release says where features stand.

    text_path: what messages call the file, where `path` is a copy. Raises JobError where it cannot be read, where a
    value is of another type, and where the trainer itself would refuse it or a plan cannot speak for it.
    """
    document = read_document(path, WHAT)
    shown = text_path or path
    if "parallel" not in document or "training" not in document:
        raise JobError(
            f"{WHAT} {shown}: it has no {'parallel' if 'parallel' not in document else 'training'}; a YAML of "
            "MindSpeed-MM's FSDP trainer (mindspeed_mm/fsdp/train/trainer.py), or of MindSpeed-LLM's (train_fsdp2.py), "
            "has parallel, model, data and training"
        )
    of_llm = llm_yaml.is_llm(document)
    document = llm_yaml.translate(document, shown, WHAT) if of_llm else document
    layout = OF_LLM if of_llm else _find_layout(document, checkout)
    top = Section(document, shown, what=WHAT)
    parallel, training = top.section("parallel", {}), top.section("training", {})
    fsdp = parallel.section("fsdp_plan", {})
    if parallel.count("tensor_parallel_size", 1) != 1:
        raise parallel.refuse("tensor_parallel_size", "the trainer has no tensor parallelism; 1 is expected")
    trainer = Trainer(
        path=shown,
        document=document,
        layout=layout,
        shard=_read_shard(parallel),
        ulysses=parallel.count("ulysses_parallel_size", 1),
        ring=parallel.count("ring_attention_size", 1),
        ep=parallel.count("expert_parallel_size", 1),
        expert_shard=parallel.number("expert_fully_shard_parallel_size", 0),
        reshard=fsdp.flag("reshard_after_forward", True),
        mbs=training.count("micro_batch_size", 1),
        accumulation=training.count("gradient_accumulation_steps", 1),
        recompute=(),
        offload=(),
        loss_chunk_tokens=_read_loss_chunk(top, layout),
        expert_modules=_read_patterns(top, ("parallel", "ep_plan", "apply_modules")),
    )
    if trainer.ulysses > 1 and trainer.ring > 1:
        raise parallel.refuse(
            "ring_attention_size",
            f"beside ulysses_parallel_size {trainer.ulysses} that shares attention in two ways at once, which is not "
            "planned; set one of the two to 1",
        )
    _check_training(training, fsdp)
    trainer = replace(trainer, ignored=tuple(_list_ignored(top, layout)))
    recompute, offload = layout.recompute_modules, layout.offload_modules
    switched = _look(top, layout.offload_switch) is True if layout.offload_switch else True
    return replace(
        trainer,
        recompute=_read_patterns(top, recompute) if _look(top, layout.recompute) is True else (),
        offload=_read_patterns(top, offload) if switched else (),
    )


def value_at(document: Mapping[str, Any], path: KeyPath) -> Any:
    """What stands at `path`; None where nothing does."""
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _find_layout(document: Mapping[str, Any], checkout: Path | None) -> Layout:
    """By the checkout's own code where there is one, else by the file."""
    if checkout and is_there(checkout / _CODE):
        return FEATURES if is_there(checkout / _FEATURES_CODE) else SCATTERED
    return FEATURES if "features" in document else SCATTERED


def _read_shard(parallel: Section) -> int:
    value = parallel.content.get("fully_shard_parallel_size")
    if value is None or value == "auto":
        return 0
    if isinstance(value, str) and value.isdigit():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise parallel.refuse("fully_shard_parallel_size", "auto or a whole number, at least 1, is expected")
    return value


def _read_loss_chunk(top: Section, layout: Layout) -> int:
    """Of a dynamic chunk, which shrinks with the micro-batch, the whole: that is what is there at one time."""
    held = top
    for key in layout.chunk_loss:
        held = held.section(str(key), {})
    sizes = held.section("chunkloss_plan", {})
    if held.flag("enable_chunk_loss", False):
        return sizes.count("chunk_size", 1024)
    if layout is FEATURES and held.flag("enable_dynamic_chunk_loss", False):
        return sizes.count("total_chunk_size", 4096)
    return 0


def _check_training(training: Section, fsdp: Section) -> None:
    """What the trainer can and a plan cannot speak for."""
    if training.section("lora", {}).flag("enable", False):
        raise JobError(
            f"{WHAT} {training.path}: training.lora.enable is true; adapters under the FSDP trainer are not planned: "
            "their optimizer and gradients are far smaller than those that would be counted"
        )
    if fsdp.flag("cpu_offload", False):
        raise fsdp.refuse("cpu_offload", "weights and optimizer on the host are not planned; false is expected")
    recipe = training.section("quantization_plan", {}).content.get("recipe_name")
    if recipe:
        raise JobError(
            f"{WHAT} {training.path}: training.quantization_plan.recipe_name is {describe_value(recipe)}; training in "
            "fewer bits is not planned; take it out to plan in bf16"
        )


_READ_BY_OTHERS = {
    True: ("parallel.recompute", "model.recompute", "model.enable_chunk_loss", "model.activation_offload_plan"),
    False: (
        "model.recompute",
        "features.recompute",
        "features.enable_chunk_loss",
        "features.enable_activation_offload",
    ),
}
"""Whether features stand together → keys that this release does not read."""


def _list_ignored(top: Section, layout: Layout) -> list[str]:
    """Keys that another release reads, and that ask for something."""
    found = []
    for name in _READ_BY_OTHERS[layout is FEATURES]:
        value = value_at(top.content, tuple(name.split(".")))
        if value is not None and value is not False:
            found.append(name)
    return found


def _look(top: Section, path: KeyPath) -> Any:
    return value_at(top.content, path)


def _read_patterns(top: Section, path: KeyPath) -> tuple[str, ...]:
    held = top
    for key in path[:-1]:
        held = held.section(str(key), {})
    value = held.content.get(str(path[-1]))
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > _MAX_PATTERNS:
        raise held.refuse(str(path[-1]), f"a list of names of modules is expected, at most {_MAX_PATTERNS}")
    return tuple(value)
