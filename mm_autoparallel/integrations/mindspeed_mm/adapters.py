"""LoRA in MindSpeed-MM: which adapters a script's flags add, as far as they can be planned.

peft freezes the whole model and puts adapters beside the matrices whose names end as --lora-target-modules says, where
model.json leaves them free (mindspeed_mm/tasks/finetune/lora/lora_patch.py). Experts of transformers' classes are no
matrices by name, so that adapters stand beside attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindspeed_mm.arguments import find_argument, find_size, find_switch
from mm_autoparallel.integrations.mindspeed_mm.trained_model import FOLDER_KEY
from mm_autoparallel.model.job.model import OF_ATTENTION, Encoder, Model

TARGETS = "--lora-target-modules"
MATRICES = {"linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2"}
"""Megatron's names of a layer's matrices → those of a job (model/job/model.py)."""

HUGGINGFACE = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "fc2",
}
"""transformers' names, which models built from a folder's config.json have (init_from_hf_path)."""

DEFAULT_RANK = 8
"""mindspeed_mm/arguments.py, --lora-r."""


def find_adapters(arguments: Sequence[str], document: dict[str, Any], model: Model) -> dict[str, Any] | None:
    """`adapters` of a job for a script with `arguments` and the model.json `document`, read as `model`; None for none.

    Raises JobError for adapters that stand elsewhere, or beside parts that train whole.
    """
    if find_switch(arguments, "--lora-target-parameters"):
        raise _refuse("--lora-target-parameters puts adapters beside parameters that are no matrices of layers")
    names = _find_words(arguments, TARGETS)
    if not names:
        return None
    matrices = HUGGINGFACE if document.get(FOLDER_KEY) else MATRICES
    unknown = [name for name in names if name not in matrices]
    if unknown:
        raise _refuse(f"{TARGETS} names {', '.join(unknown)} (known are {', '.join(matrices)})")
    if find_switch(arguments, "--lora-mixed-training") or document.get("lora_mixed_training"):
        raise _refuse("lora_mixed_training trains some parts whole beside adapters in others")
    targets = [matrices[name] for name in dict.fromkeys(names)]
    for modality in model.modalities:
        layers = modality.layers
        if isinstance(modality, Encoder) and not modality.projector.freeze and {"fc1", "fc2"} & {*targets}:
            raise _refuse(
                f"the projector of {modality.name} is not frozen in model.json, so its linear_fc1 and linear_fc2 have "
                "adapters too"
            )
        if modality.freeze:
            continue
        if layers.latent or layers.delta or (layers.experts and {*targets} - {*OF_ATTENTION}):
            raise _refuse(
                f"{modality.name} has {'experts' if layers.experts else 'no plain attention'}, beside which such "
                "adapters are not understood"
            )
        if isinstance(modality, Encoder) and (not layers.packed or matrices is HUGGINGFACE):
            raise _refuse(f"{modality.name} is not frozen, and which of its matrices have those names is not known")
    if all(modality.freeze for modality in model.modalities):
        raise _refuse("every part is frozen in model.json, so no adapter stands anywhere")
    rank = find_size(arguments, "--lora-r", DEFAULT_RANK)
    return {"rank": rank, "targets": targets, "dropout": _drops(find_argument(arguments, "--lora-dropout"))}


def _find_words(arguments: Sequence[str], flag: str) -> list[str]:
    """The words behind `flag`, of several the last's, with spaces or commas between."""
    words: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == flag:
            words = [*takewhile(lambda word: not word.startswith("--"), arguments[index + 1 :])]
        elif argument.startswith(f"{flag}="):
            words = [argument.partition("=")[2]]
    return [name for word in words for name in word.split(",") if name]


def _drops(value: str | None) -> bool:
    try:
        return value is not None and float(value) > 0
    except ValueError:
        raise JobError(f"--lora-dropout is {value}; a number is expected among the script's arguments") from None


def _refuse(reason: str) -> JobError:
    return JobError(
        f"the command line: {reason}, which is not planned; planned are adapters beside the layers of parts that "
        "model.json leaves free"
    )
