"""Which operators `select_recompute` and `select_comm_recompute` of a pretrain YAML name, and in which layers.

A list of patterns, or `true`, holds in every layer that is not recomputed whole; a mapping says for each pattern in
which; counts without patterns are those of MindFormers' own patterns (mindformers/models/utils.py, LayerSetting).
`mp_comm_recompute` and `parallel_optimizer_comm_recompute` stand beside them in YAMLs; LayerSetting hands neither to a
layer, so they change nothing for these models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.mindformers.model_section import WHAT
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, recompute_config
from mm_autoparallel.model.operators.mindformers_recompute import PATH_DOT

SELECT_KEY, COMM_KEY = SELECT_KEYS = ("select_recompute", "select_comm_recompute")
"""Keys under recompute_config: operators recomputed in the first layers of each chunk that are not recomputed whole."""

_OWN_PATTERNS = {
    SELECT_KEY: (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"),
    COMM_KEY: (r".*\.norm",),
}
_OWN_TODAY = (
    r"mlp\.shared_experts\.mul",
    r"mlp\.shared_experts\.activation_func\.silu",
    r"mlp\.mul",
    r"mlp\.activation_func\.silu",
)
"""SELECT_KEY's with use_legacy: False (mindformers/parallel_core/training_graph/transformer/utils.py)."""


@dataclass(frozen=True)
class Selected:
    """patterns: of operators. everywhere: they hold in every layer that is not recomputed whole."""

    patterns: tuple[str, ...]
    everywhere: bool


def read_selected(pretrain: Pretrain, key: str) -> Selected:
    """What `key` (of SELECT_KEYS) says. Raises PlanError where it is of no form that MindFormers reads."""
    value: Any = recompute_config(pretrain).get(key)
    own = _OWN_TODAY if pretrain.model.is_mcore and key == SELECT_KEY else _OWN_PATTERNS[key]
    found = Selected(own, value is True)
    if isinstance(value, list) and any(isinstance(item, str) for item in value):
        found = Selected(tuple(value), True)
    elif isinstance(value, dict) and value:
        wrong = next((name for name, of_it in value.items() if not isinstance(of_it, (bool, list))), None)
        if wrong is not None:
            raise _wrong(pretrain, f"{key}.{wrong}", value[wrong], "true, false or counts [chunk][stage] are expected")
        on = {pattern: of_it for pattern, of_it in value.items() if of_it is not False}
        found = Selected(tuple(on), bool(on) and all(of_it is True for of_it in on.values()))
    elif value is not None and not isinstance(value, (bool, list, dict)):
        forms = "true, false, a list of patterns, counts [chunk][stage] or a mapping of patterns to them are expected"
        raise _wrong(pretrain, key, value, forms)
    for pattern in found.patterns:
        _check_pattern(pretrain, key, pattern)
    return found


def _check_pattern(pretrain: Pretrain, key: str, pattern: object) -> None:
    if not isinstance(pattern, str):
        raise _wrong(pretrain, key, pattern, "a list of patterns holds texts alone")
    try:
        for part in pattern.split(PATH_DOT):
            re.compile(part)
    except re.error as error:
        raise _wrong(pretrain, key, pattern, f"a regular expression is expected ({error})") from None


def _wrong(pretrain: Pretrain, key: str, value: object, problem: str) -> PlanError:
    return PlanError(f"{WHAT} {pretrain.path}: recompute_config.{key} is {describe_value(value)}; {problem}")


def check_no_exclusions(pretrain: Pretrain) -> None:
    """Raise PlanError where operators are taken out of the selected ones: what they keep is not worked out."""
    for key in SELECT_KEYS:
        value = recompute_config(pretrain).get(f"{key}_exclude")
        if value:
            advice = "leave it out, or give --memory FILE with figures of a dry run"
            raise _wrong(pretrain, f"{key}_exclude", value, f"sizes do not tell what is kept with it; {advice}")
