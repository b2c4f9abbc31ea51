"""Documents with one value or a layout changed, for tests of what readers make of them."""

from __future__ import annotations

from typing import Any

from mm_autoparallel.integrations.mindformers.layout import Layout, layout_changes
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.yaml_text import set_yaml_values


def set_value(document: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at the dotted `key`, making mappings on the way; `...` takes the key away, where it is there."""
    *path, last = key.split(".")
    for step in path:
        document = document.setdefault(step, {})
    document.pop(last, None)
    if value is not ...:
        document[last] = value


def format_layout(pretrain: Pretrain, layout: Layout) -> str:
    """The YAML's text with `layout` in it; everything else as it was."""
    return set_yaml_values(pretrain.text, layout_changes(pretrain, layout))
