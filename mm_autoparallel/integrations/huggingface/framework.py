"""Hugging Face, as it is registered: the form of its model files, and how their live classes are built."""

from __future__ import annotations

from collections.abc import Sequence

from mm_autoparallel.integrations.framework import Framework, LiveModels
from mm_autoparallel.model.readers.model_form import ModelForm, Undescribed


def _models() -> Sequence[ModelForm]:
    from mm_autoparallel.integrations.huggingface.config import is_huggingface, read_huggingface
    from mm_autoparallel.integrations.huggingface.generic import is_generic, trace_config
    from mm_autoparallel.integrations.huggingface.job import fill_job

    return [
        ModelForm(
            mark="a Hugging Face config.json has model_type",
            is_one=is_huggingface,
            read=read_huggingface,
            asked_last=True,
            undescribed=Undescribed(is_generic, trace_config),
            fill_job=fill_job,
        )
    ]


def _live_models() -> LiveModels:
    from mm_autoparallel.profilers.huggingface import class_name, make_subject, scale_workload

    return LiveModels(make_subject, scale_workload, lambda document: f"transformers {class_name(document)}")


FRAMEWORK = Framework("Hugging Face", models=_models, live_models=_live_models)
