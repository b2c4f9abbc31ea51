"""Megatron-Bridge as a dialect of Megatron-LM: fields in the place of flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.megatron_bridge.config import open_config, read_fields
from mm_autoparallel.integrations.megatron_bridge.recipes import read_adapters
from mm_autoparallel.integrations.megatron_core.dialect import Dialect, without_mindspeed
from mm_autoparallel.integrations.megatron_core.launch import describe_launch

BRIDGE = Dialect("Megatron-Bridge", "0.3.1", lambda passed: passed, without_mindspeed, lambda _: (), open=open_config)


def describe_config(path: Path, given: Given) -> Described:
    """The training of the configuration at `path`, adapters included. Raises JobError or PlanError as `describe_launch`
    does."""
    return replace(describe_launch(path, given, BRIDGE), adapters=read_adapters(read_fields(path, given)))
