"""Which form of a model a mapping is: our own, that of a registered framework, or Megatron-LM's flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.traced_model import is_traced_model, parse_traced_model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_arguments import is_megatron_arguments, read_megatron_arguments
from mm_autoparallel.model.readers.model_form import ModelForm
from mm_autoparallel.model.readers.registry import Offer, describe_broken, find_offer, list_offers
from mm_autoparallel.records import Noun
from mm_autoparallel.validation import describe_unfit, parse_record


class _Inline(Noun):
    """A model under the key of a job, so that messages name its keys as they stand there."""

    model: Model


def read_model(path: Path) -> Model:
    """The model in the file at `path`, in any form that is known. Raises JobError naming file and key."""
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


def find_form(document: Mapping[str, Any], what: str) -> Offer[ModelForm] | None:
    """The form of a framework that the model file's content `document`, called `what` in messages, is of.

    None where it is in this project's own form, traced, or of no framework. Raises JobError where several claim it.
    """
    is_own = "text" in document and document.keys() <= Model.model_fields.keys()
    if is_own or is_traced_model(document):
        return None
    return find_offer(list_offers("models", ModelForm), document, what)


def _parse_foreign(file: Section) -> Model | None:
    """The model, where another tool's form is recognised; None where it can only be our own."""
    where = f"{file.what} {file.path}"
    try:
        if is_traced_model(file.content):
            return parse_traced_model(file.content, file.path)
        found = find_form(file.content, where)
        if found:
            return _read(found, file)
        if is_megatron_arguments(file.content):
            return read_megatron_arguments(file)
    except ValidationError as failure:  # sizes that are each right but do not go together
        raise _unfit_error(failure, file) from None
    if "text" not in file.content:
        forms = sorted((offer.given for offer in list_offers("models", ModelForm)), key=lambda form: form.asked_last)
        raise JobError(
            f"{where}: {file.key or 'it'} is no model that is understood; {', '.join(form.mark for form in forms)}, "
            "arguments of Megatron-LM have num_layers, hidden_size and num_attention_heads, and the form of this "
            f"project has text (and encoders){describe_broken()}"
        )
    return None


def _unfit_error(failure: ValidationError, file: Section) -> JobError:
    """A size that is made of several and became too large is told with the file's largest number."""
    reason = describe_unfit(failure)
    if any(finding["type"] == "less_than_equal" for finding in failure.errors()):
        number, key = max(_numbers(file), default=(0, ""))
        reason += f" (the file's largest number is {key} {number:,})" if key else ""
    return JobError(reason, where=f"{file.what} {file.path}")


def _numbers(part: Section) -> Iterator[tuple[int, str]]:
    """Whole numbers in `part` and what is inside, each with its key."""
    for key, value in part.content.items():
        if isinstance(value, Mapping):
            yield from _numbers(part.section(key))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value, part.where(key)


def _read(form: Offer[ModelForm], file: Section) -> Model:
    model = form.given.read(file)
    if not isinstance(model, Model):
        raise JobError(
            f"{file.what} {file.path}: the framework {form.of.name} (distribution {form.of.distribution}) reads it as "
            f"{describe_value(model)}, and a Model is expected; mend or uninstall it"
        )
    return model
