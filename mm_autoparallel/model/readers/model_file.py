"""Which of the four forms of a model a mapping is: our own, MindSpeed-MM's, Hugging Face's, or Megatron-LM's flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.traced_model import is_traced_model, parse_traced_model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.huggingface import is_huggingface, read_huggingface
from mm_autoparallel.model.readers.megatron_arguments import is_megatron_arguments, read_megatron_arguments
from mm_autoparallel.model.readers.mindspeed_mm import is_mindspeed_mm, read_mindspeed_mm
from mm_autoparallel.records import Noun
from mm_autoparallel.validation import parse_record


class _Inline(Noun):
    """A model under the key of a job, so that messages name its keys as they stand there."""

    model: Model


def read_model(path: Path) -> Model:
    """The model in the file at `path`, in any of the four forms. Raises JobError naming file and key."""
    document = read_document(path, "model file")
    found = _parse_foreign(Section(document, path))
    return found or parse_record(Model, document, "model file", path)


def parse_foreign_model(document: Mapping[str, Any], path: Path, key: str = "") -> Model:
    """The model in `document`, read from `path` and added to, in another tool's form. Raises JobError as read_model.

    key: where it stands in the file.
    """
    found = _parse_foreign(Section(document, path, key=key))
    assert found is not None
    return found


def parse_inline_model(document: Mapping[str, Any], path: Path) -> Model:
    """The model that stands under `model` in the job file at `path`. Raises JobError naming file and key."""
    found = _parse_foreign(Section(document, path, key="model", what="job file"))
    return found or parse_record(_Inline, {"model": document}, "job file", path).model


def _parse_foreign(file: Section) -> Model | None:
    """The model, where another tool's form is recognised; None where it can only be our own."""
    where = f"{file.what} {file.path}"
    try:
        if is_traced_model(file.content):
            return parse_traced_model(file.content, file.path)
        if is_mindspeed_mm(file.content):
            return read_mindspeed_mm(file)
        if is_huggingface(file.content):
            return read_huggingface(file)
        if is_megatron_arguments(file.content):
            return read_megatron_arguments(file)
    except ValidationError as failure:  # sizes that are each right but do not go together
        reasons = [str(finding.get("ctx", {}).get("error", finding["msg"])) for finding in failure.errors()]
        raise JobError("; ".join(reasons), where=where) from None
    if "text" not in file.content:
        raise JobError(
            f"{where}: {file.key or 'it'} is no model that is understood; MindSpeed-MM's model.json has text_decoder, "
            "a Hugging Face config.json has model_type, arguments of Megatron-LM have num_layers, hidden_size and "
            "num_attention_heads, and the form of this project has text (and encoders)"
        )
    return None
