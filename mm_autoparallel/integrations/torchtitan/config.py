"""A torchtitan configuration as plain values: [parallelism], [training] and recompute, of TOML or Python.

0.2: sections of a TOML. 0.3: a function of a config_registry.py that returns `Trainer.Config(...)` with values that
stand there, or the literals of a planned.py that `export` wrote. Nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import describe_value, read_text
from mm_autoparallel.integrations.config_files import section_at
from mm_autoparallel.integrations.python_text import assigns, read_literal, read_python
from mm_autoparallel.integrations.toml_text import parse_toml
from mm_autoparallel.validation import nearest

PARALLELISM, TRAINING, RECOMPUTED = "PARALLELISM", "TRAINING", "RECOMPUTED"
"""What the planned.py that `export` writes assigns: sections, and the layers that run again."""


@dataclass(frozen=True)
class Config:
    """What decides. recompute: `full`, `none`, `selective`, every how many-th layer, or the layers' names.

    version: the generation, 0.2 or 0.3. notes: what was assumed.
    """

    version: str
    parallelism: Mapping[str, Any]
    training: Mapping[str, Any]
    recompute: str | int | tuple[str, ...]
    notes: tuple[str, ...] = ()


def is_config(path: Path) -> bool:
    """Whether the file at `path` is one of torchtitan's."""
    try:
        if path.suffix == ".toml":
            document = parse_toml(read_text(path, "configuration", "TOML"), str(path))
            return "parallelism" in document or {"training", "model"} <= set(document)
        if path.suffix != ".py":
            return False
        text = read_text(path, "file", "Python")
        return "torchtitan" in text and ("Trainer.Config" in text or f"{PARALLELISM} =" in text)
    except PlannerError:
        return False


def read_config(path: Path, entry: str | None) -> Config:
    """The configuration at `path`. entry: the function that is meant, where a file has several.

    Raises JobError naming what cannot be read without running it.
    """
    if path.suffix != ".toml":
        if assigns(path, PARALLELISM):
            recomputed = tuple(read_literal(path, RECOMPUTED))
            return Config("0.3", read_literal(path, PARALLELISM), read_literal(path, TRAINING), recomputed)
        return _read_registry(path, entry)
    document, where = parse_toml(read_text(path, "configuration", "TOML"), str(path)), str(path)
    return read_document(document, where)


def read_document(document: Mapping[str, Any], where: str) -> Config:
    """The configuration of a TOML's content. Raises JobError naming the key that nobody knows or planned."""
    again = section_at(document, "activation_checkpoint", where)
    mode, option = again.get("mode", "selective"), str(again.get("selective_ac_option", "2"))
    if mode not in ("none", "full", "selective"):
        raise JobError(f"{where}: activation_checkpoint.mode is {describe_value(mode)}; none and full are planned")
    recompute: str | int = mode
    if mode == "selective" and option.isdigit() and 0 < len(option) < 6:
        recompute = int(option)
    parallelism, training = (section_at(document, section, where) for section in ("parallelism", "training"))
    check_known(parallelism, "parallelism", "0.2", f"{where}: [parallelism]")
    check_known(training, "training", "0.2", f"{where}: [training]")
    return Config("0.2", parallelism, training, recompute, _notes(recompute))


def _notes(recompute: str | int) -> tuple[str, ...]:
    if recompute != "selective":
        return ()
    return ("selective recompute keeps what some operators give; taken is no recompute, which keeps more",)


def check_known(section: Mapping[str, Any], name: str, version: str, where: str) -> None:
    """Raises JobError for a key of parallelism or training that torchtitan does not have, with the nearest."""
    known = KNOWN[name, version].split()
    for key in section:
        if key not in known:
            raise JobError(f"{where}: {key} is not known there{nearest(str(key), known)}")


Sections = dict[str, ast.expr]
"""`parallelism.tensor_parallel_degree`, or `activation_checkpoint` → the value as the file has it."""


def list_entries(path: Path) -> list[str]:
    """Functions of a registry that return a Trainer.Config, whether they can be read or not."""
    return [*_find_functions(read_python(path))]


def _find_functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.returns is not None]
    return {node.name: node for node in found if ast.unparse(node.returns or node) == "Trainer.Config"}


def _read_registry(path: Path, entry: str | None) -> Config:
    found = _find_functions(read_python(path))
    if entry is not None and entry not in found:
        raise JobError(f"{path}: --entry {entry}: no function of that name returns a Trainer.Config"
                       f"{nearest(entry, list(found))}; known are {', '.join(found) or 'none'}")  # fmt: skip
    if entry is None and len(found) != 1:
        raise JobError(
            f"{path}: {len(found)} functions return a Trainer.Config{': ' if found else ''}{', '.join(found)}; say "
            "which with --entry"
        )
    name = entry or next(iter(found))
    given = _follow(name, found, path, ())
    sections = {
        section: {
            key.partition(".")[2]: _literal(value, f"{path}: line {value.lineno}, {key}")
            for key, value in given.items()
            if key.startswith(f"{section}.")
        }
        for section in ("parallelism", "training")
    }
    for section, values in sections.items():
        check_known(values, section, "0.3", f"{path}: {section}")
    recompute = _read_recompute(given.get("activation_checkpoint"), path)
    return Config("0.3", sections["parallelism"], sections["training"], recompute, _notes(recompute))


def _follow(name: str, functions: Mapping[str, ast.FunctionDef], path: Path, above: tuple[str, ...]) -> Sections:
    """What the function `name` says: a call of Config, or another function's with values set over them."""
    if name not in functions or name in above:
        raise JobError(f"{path}: {' → '.join((*above, name))}: a function of this file is expected there")
    body, given, variable = functions[name].body, Sections(), ""
    for node in body:
        value = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        base = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        is_config = isinstance(value, ast.Call) and ast.unparse(value.func) == "Trainer.Config"
        if is_config or (base in functions and (isinstance(target, ast.Name) or isinstance(node, ast.Return))):
            assert isinstance(value, ast.Call)
            given = _sections_of(value, path) if is_config else _follow(base, functions, path, (*above, name))
            variable = target.id if isinstance(target, ast.Name) else ""
        elif target is not None and value is not None and ast.unparse(target).startswith(f"{variable}."):
            given |= _set(ast.unparse(target).partition(".")[2], value, path)
        elif isinstance(node, ast.Return) and not (isinstance(value, ast.Name) and value.id == variable):
            raise JobError(f"{path}: line {node.lineno}: what {name} returns is known only when the file runs")
    if not given:
        raise JobError(f"{path}: {name} calls no Trainer.Config and no function of this file")
    return given


def _sections_of(call: ast.Call, path: Path) -> Sections:
    given = Sections()
    for each in call.keywords:
        given |= _set(str(each.arg), each.value, path)
    return given


def _set(key: str, value: ast.expr, path: Path) -> Sections:
    """A value that decides, or those of a section; nothing for what a plan does not say."""
    if key not in ("parallelism", "training"):
        return {key: value}
    if not isinstance(value, ast.Call) or value.args or any(each.arg is None for each in value.keywords):
        raise JobError(f"{path}: line {value.lineno}: {key} is no call with keywords")
    return {f"{key}.{each.arg}": each.value for each in value.keywords}


def _literal(node: ast.expr, where: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, RecursionError, MemoryError):
        raise JobError(f"{where} is known only when the file runs; write the value itself there") from None


def _read_recompute(node: ast.expr | None, path: Path) -> str:
    if node is None:
        return "selective"  # Trainer.Config's own default
    if isinstance(node, ast.Constant) and node.value is None:
        return "none"
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    kinds = {"FullAC.Config": "full", "SelectiveAC.Config": "selective"}
    if name not in kinds:
        raise JobError(f"{path}: line {node.lineno}: activation_checkpoint is {name or 'no call'}; FullAC is planned")
    return kinds[name]


_PARALLELISM = (
    "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree "
    "pipeline_parallel_degree module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
    "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size context_parallel_degree "
    "context_parallel_load_balancer expert_parallel_degree"
)
_TRAINING = (
    "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype mixed_precision_param "
    "mixed_precision_reduce gc_freq gc_debug"
)
KNOWN = {
    ("parallelism", "0.2"): f"{_PARALLELISM} disable_loss_parallel enable_async_tensor_parallel "
    "pipeline_parallel_expert_parallel_overlap context_parallel_rotate_method expert_tensor_parallel_degree "
    "expert_parallel_comm_backend",
    ("parallelism", "0.3"): f"{_PARALLELISM} enable_fsdp_symm_mem enable_sequence_parallel spmd_backend "
    "context_parallel_ptrr_mask_key",
    ("training", "0.2"): f"{_TRAINING} dataset dataset_path dataloader",
    ("training", "0.3"): f"{_TRAINING} disable_cuda_graphs",
}
"""Section, generation → its keys (config/job_config.py of 0.2.2, config/configs.py of 0.3.0)."""
