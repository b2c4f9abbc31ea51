"""What the registered frameworks can do, by the file at hand: launches that are planned, models that are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.framework import Framework, LaunchKind, LiveModels
from mm_autoparallel.integrations.launch_script import SUFFIXES, read_launch_script
from mm_autoparallel.model.readers import registry
from mm_autoparallel.model.readers.model_file import find_form
from mm_autoparallel.model.readers.model_form import ModelForm

_OTHERS = (
    (
        r"(?<![\w./-])(?P<what>(?:megatron|swift)[ \t]+(?:pt|sft|rlhf))(?![\w.-])",
        "it starts `{what}`, ms-swift's command, which takes the model from a folder of weights and spells flags in "
        "its own way; that is not read",
    ),
    (
        r"^[ \t]*(?:source|\.)[ \t]+[\"']?(?P<what>\S*scripts/models/[\w.-]+\.sh|\S*SCRIPT_DIR\S*/models/[\w.-]+\.sh)",
        "it takes its model from {what}, as slime's scripts do, and trains by reinforcement beside engines that "
        "generate, which is not planned",
    ),
    (
        r"(?<![\w-])(?P<what>(?:pretrain_(?:bert|t5|ict|retro|vision_\w+)|finetune_t5)\.py)(?![\w.])",
        "it starts {what}; decoders, and vision-language models around one, are planned",
    ),
)
"""Pattern of a script → what it does."""


def name_trainer(path: Path) -> str:
    """What the script at `path` starts that is known and not read, a clause; empty where nothing is known of it.

    Raises JobError where a script cannot be read.
    """
    if path.suffix not in SUFFIXES or not path.suffix:
        return ""
    script = read_launch_script(path)
    for pattern, what in _OTHERS:
        for match in script.find(pattern):
            found = match["what"].strip("\"'")
            return f"line {script.line(match.start('what'))}: {what.format(what=' '.join(found.split()))}"
    return ""


def frameworks() -> dict[str, Framework]:
    """Name → framework, of all that are registered."""
    return {one.name: one.framework for one in registry.list_frameworks() if isinstance(one.framework, Framework)}


def ask_frameworks() -> tuple[tuple[registry.Registered, ...], tuple[str, ...]]:
    """All that are registered, and a sentence for each thing that another distribution gives and that cannot be used:
    every framework is asked for its model files and its launches.
    """
    registry.list_offers("models", ModelForm)
    registry.list_offers("launches", LaunchKind)
    return registry.list_frameworks(), registry.list_broken()


def find_launch(path: Path) -> LaunchKind:
    """The kind of launch that the file at `path` is. Raises JobError where it is none that is known."""
    offers = registry.list_offers("launches", LaunchKind)
    found = registry.find_offer(offers, path, str(path))
    other = name_trainer(path) if not found or found.given.asked_last else ""
    if other:
        raise JobError(f"launch script {path}: {other}")
    if found:
        return found.given
    kinds = sorted((offer.given for offer in offers), key=lambda kind: kind.asked_last)
    raise JobError(
        f"{path} is no file that starts a training; known are {', '.join(kind.title for kind in kinds)}"
        f"{registry.describe_broken()}"
    )


def is_built_live(document: Mapping[str, Any], what: str) -> bool:
    """Whether models are built from the model file's content `document`, called `what` in messages. Needs no torch."""
    form = find_form(document, what)
    return form is not None and _live_provider(form) is not None


def live_models_of(document: Mapping[str, Any], what: str) -> LiveModels:
    """How the model of `document` is built, of which `is_built_live` is true. Needs torch.

    Raises JobError where another distribution's framework gives something else.
    """
    form = find_form(document, what)
    provider = _live_provider(form) if form else None
    assert form is not None
    assert provider is not None
    found = provider()
    if not isinstance(found, LiveModels):
        raise JobError(
            f"{what}: the framework {form.of.name} (distribution {form.of.distribution}) builds live models by "
            f"{describe_value(found)}, and LiveModels are expected; mend or uninstall it"
        )
    return found


def _live_provider(form: registry.Offer[ModelForm]) -> Callable[[], LiveModels] | None:
    framework = form.of.framework
    return framework.live_models if isinstance(framework, Framework) else None
