"""Megatron-Bridge as a dialect of Megatron-LM: fields in the place of flags."""

from __future__ import annotations

from mm_autoparallel.integrations.megatron_bridge.config import open_config
from mm_autoparallel.integrations.megatron_core.dialect import Dialect

BRIDGE = Dialect(
    "Megatron-Bridge", "0.3.1", lambda passed: passed, lambda decided: decided, lambda _: (), open=open_config
)
