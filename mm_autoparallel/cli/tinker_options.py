"""Tinker's options: their names, short forms and defaults, from the command line, then parameter_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError

MODES = ("all", "profile", "search", "simulate")


@dataclass(frozen=True)
class Option:
    """One option. flags: as they are written; default: where nobody says; kind: int, str or bool; sections: of
    parameter_config.json that it stands in; words: what it may be."""

    flags: tuple[str, ...]
    default: Any
    kind: type
    sections: tuple[str, ...]
    help: str
    words: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """In parameter_config.json."""
        return next(flag for flag in self.flags if flag.startswith("--")).removeprefix("--")


_BOTH = ("search", "simulate")
VERSIONS = ("1.0", "1.1", "1.2", "1.0.0", "2.0.0", "2.3.0")
OPTIONS = (
    Option(("-name", "--model_name"), "example", str, ("profile",), "the model's name"),
    Option(("-size", "--model_size"), "7b", str, ("profile",), "its size, in words"),
    Option(("-sh", "--pretrain_script_path"), None, str, ("profile",), "the launch script that is measured"),
    Option(("-v", "--version"), "1.1", str, ("profile",), "release of MindSpeed-LLM", VERSIONS),
    Option(("-p", "--save_path"), "./profiled_data", str, ("profile",), "where a folder of measurements goes"),
    Option(("-tp", "--prof_tp"), "1,2,4", str, ("profile",), "TP sizes that are measured"),
    Option(("-sp", "--prof_sp"), "0,1", str, ("profile",), "sequence parallelism off and on"),
    Option(("--max_mbs",), 65536, int, ("profile",), "largest micro-batch that is measured"),
    Option(("-i", "--task_id"), "test", str, ("profile",), "a word at the folder's end"),
    Option(("--max_npu",), 8, int, ("profile",), "devices that are measured on"),
    Option(("-profiled", "--profiled_data_path"), None, str, _BOTH, "folder of measurements"),
    Option(("-gbs", "--global_batch_size"), None, int, _BOTH, "samples of a step"),
    Option(("-nodes", "--num_nodes"), 4, int, _BOTH, "nodes"),
    Option(("-n", "--num_npus_per_node"), 8, int, _BOTH, "devices of a node"),
    Option(("-cpus", "--cpus"), 20, int, ("search",), "processes of Tinker's own search; one is enough here"),
    Option(("-mem", "--memory_limit"), 57000, int, ("search",), "MiB of a device"),
    Option(("-output", "--output_dir"), "./results", str, ("search",), "where results go"),
    Option(("-shs", "--pretrain_script_path_search"), None, str, ("search",), "launch script that takes the results"),
    Option(("--simu_tp",), 1, int, ("simulate",), "TP"),
    Option(("--simu_pp",), 1, int, ("simulate",), "PP"),
    Option(("--simu_ep",), 1, int, ("simulate",), "EP"),
    Option(("--simu_sp",), 0, int, ("simulate",), "sequence parallelism", (0, 1)),
    Option(("--dist_opt", "--zero"), 0, int, ("simulate",), "distributed optimizer", (0, 1)),
    Option(("-mbs", "--micro_batch_size"), 1, int, ("simulate",), "samples of a micro-batch"),
    Option(("--num_layer_list",), None, str, ("simulate",), "layers of each stage, such as 4,4,4,4"),
    Option(("--recompute",), 0, int, ("simulate",), "all layers run again in the backward", (0, 1)),
)
"""In the order of Tinker's groups (utils/config.py of 1.3.0); `--zero` is its README's word for --dist_opt."""

_MORE_KEYS = {"simulate": ("num_layers", "zero"), "profile": ("is_full_tune",), "search": ()}
"""Keys that its own example files have besides, of which `zero` is --dist_opt and the others say nothing here."""


def read_settings(mode: str, given: Mapping[str, Any], config: Path | None) -> dict[str, Any]:
    """Option → its value: as given on the command line, else by the mode's section of the file `config`, else the
    default. Raises JobError naming section or key of the file that is not known or malformed."""
    sections = _read_config(config) if config else {}
    used = ("profile", "search") if mode == "all" else (mode,)
    found: dict[str, Any] = {}
    for option in OPTIONS:
        value = given.get(option.name)
        for section in used:
            if value is None and section in option.sections:
                value = sections.get(section, {}).get(option.name)
        found[option.name] = option.default if value is None else value
    return found


def _read_config(path: Path) -> dict[str, dict[str, Any]]:
    from mm_autoparallel.files import describe_value, read_document
    from mm_autoparallel.validation import nearest

    document = read_document(path, "parameter file")
    found: dict[str, dict[str, Any]] = {}
    for name, section in document.items():
        if name not in _MORE_KEYS:
            raise JobError(f"{path}: {name} is no section{nearest(name, MODES[1:])}; known are {', '.join(MODES[1:])}")
        if not isinstance(section, dict):
            raise JobError(f"{path}: {name} is {describe_value(section)}; a mapping of keys to values is expected")
        known = {option.name: option for option in OPTIONS if name in option.sections}
        found[name] = {}
        for key, value in section.items():
            if key not in known and key not in _MORE_KEYS[name]:
                raise JobError(f"{path}: {name}.{key} is not known{nearest(key, list(known))}")
            option = known.get("dist_opt" if key == "zero" else key)
            if option is not None and value is not None:
                found[name][option.name] = _check(option, value, f"{path}: {name}.{key}")
    return found


def _check(option: Option, value: Any, where: str) -> Any:
    """`value` as the option's kind. Raises JobError."""
    from mm_autoparallel.files import describe_value

    if option.kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, option.kind) or isinstance(value, bool):
        expected = "a whole number" if option.kind is int else "a word"
        raise JobError(f"{where} is {describe_value(value)}; {expected} is expected")
    if option.words and value not in option.words:
        raise JobError(f"{where} is {describe_value(value)}; one of {', '.join(map(str, option.words))} is expected")
    return value
