"""Which file has the sizes of the model that a launch trains: model.json, a YAML's model section, or a config.json.

Where a model file names a Hugging Face folder (`init_from_hf_path`), MindSpeed-MM builds the model of that folder's
config.json; the sizes beside it are placeholders that its argument checks want (`num_layers: 999`), and are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_there, read_document
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
from mm_autoparallel.integrations.mindspeed_mm.model_reader import is_mindspeed_mm
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.model_file import parse_foreign_model, read_model

FOLDER_KEY = "init_from_hf_path"

_MODEL_TYPES: dict[str, tuple[str, ...]] = {
    "internvl": ("internvl", "internvl_chat"),
    "qwen3_omni_moe": ("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
}
"""model_id → the model_types of its configurations, where they are not called the same."""

_FREEZE_KEYS = {
    "vision": (("image_encoder", "vision_encoder"), ("vision_encoder",)),
    "vision_projector": (("image_encoder", "vision_projector"), ("vision_projector",)),
    "audio": (("audio_encoder", "audio_encoder"),),
    "text": (("text_decoder",),),
}
"""Part → where a model file may say `freeze` of it."""


def read_trained_model(
    path: Path,
    decoder: Mapping[str, Any],
    model_config: Path | None = None,
    find: Callable[[str], Path] = Path,
) -> tuple[Path | Model, Model]:
    """What a job says under `model`, and the model itself, for the model file at `path`.

    decoder: what the command line says of the text decoder. model_config: the config.json that has the sizes, where a
    person names it. find: the path here of a path that the file names. Raises JobError where a file is missing, is
    another model's, or cannot be read as a model.
    """
    document = read_document(path, "model file")
    section = model_section(document, path)
    if FOLDER_KEY in section and section[FOLDER_KEY] is not None:
        return (model := _read_config(section, path, model_config, find)), model
    if model_config is not None:
        raise JobError(
            f"model file {path}: its sizes are its own (it has no {FOLDER_KEY}), so --model-config {model_config} has "
            "no say; leave that out"
        )
    if section is document:
        model = read_model_json(path, decoder)
        return model if decoder else path, model
    if not is_mindspeed_mm(section):
        raise JobError(f"model file {path}: model has no text_decoder, so it is no vision-language model")
    model = parse_foreign_model(section, path, key="model")
    return model, model


def model_section(document: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The model's part of a YAML that has the arguments too (gpt_args), else the whole file. Raises JobError."""
    if "gpt_args" not in document:
        return document
    section = document.get("model")
    if not isinstance(section, Mapping):
        raise JobError(f"model file {path}: model is {describe_value(section)}; a mapping is expected beside gpt_args")
    return section


def _read_config(
    section: Mapping[str, Any], path: Path, model_config: Path | None, find: Callable[[str], Path]
) -> Model:
    folder = section[FOLDER_KEY]
    if not isinstance(folder, str):
        raise JobError(f"model file {path}: {FOLDER_KEY} is {describe_value(folder)}; the path of a folder is expected")
    config = model_config or find(folder) / "config.json"
    if not is_there(config):
        if model_config is not None:
            raise JobError(f"model config {config}: there is no such file; give the model's own config.json")
        raise JobError(
            f"model file {path}: {FOLDER_KEY} is {describe_value(folder)}, and the sizes of the model are in that "
            "folder's config.json, which is not here; sizes beside it are placeholders. Put it there, or give it to "
            "`plan --script` with --model-config PATH (the model's page on the hub has it)"
        )
    _check_same_model(section, path, read_document(config, "model config"), config)
    model = read_model(config)
    # What nobody freezes is trained, other than a bare config.json is planned (models/transformers/internvl3_5.py).
    return model.with_freeze({encoder.name: False for encoder in model.encoders} | _frozen(section, path, model))


def _check_same_model(section: Mapping[str, Any], path: Path, config: Mapping[str, Any], config_path: Path) -> None:
    model_id, model_type = section.get("model_id"), config.get("model_type")
    if not isinstance(model_id, str):
        return
    expected = _MODEL_TYPES.get(model_id, (model_id,))
    if model_type not in expected:
        raise JobError(
            f"model config {config_path}: model_type is {describe_value(model_type)}, and {path} trains the model_id "
            f"{model_id}, whose config.json has {' or '.join(expected)}; give the config.json of that model"
        )


def _frozen(section: Mapping[str, Any], path: Path, model: Model) -> dict[str, bool]:
    names = [modality.name for modality in model.modalities] + [
        f"{encoder.name}_projector" for encoder in model.encoders
    ]
    frozen = {}
    for part, places in _FREEZE_KEYS.items():
        for keys in places if part in names else ():
            here: Any = section
            for key in keys:
                here = here.get(key) if isinstance(here, Mapping) else None
            value = here.get("freeze") if isinstance(here, Mapping) else None
            if value is not None:
                if not isinstance(value, bool):
                    raise JobError(
                        f"model file {path}: {'.'.join(keys)}.freeze is {describe_value(value)}; true or false is "
                        "expected"
                    )
                frozen[part] = value
    return frozen
