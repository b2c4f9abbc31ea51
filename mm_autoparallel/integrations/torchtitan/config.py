"""A torchtitan configuration as plain values: [parallelism], [training] and recompute, of TOML or Python.

0.2: sections of a TOML. 0.3, and the newest code, which counts tokens: a function of a config_registry.py that returns
`Trainer.Config(...)`, or the literals of a planned.py that `export` wrote. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.files import describe_value, read_text
from mm_autoparallel.integrations.config_files import section_at, size_at
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.python_text import assigns, read_literal
from mm_autoparallel.integrations.toml_text import parse_toml
from mm_autoparallel.integrations.torchtitan.registry import AGAIN, SECTIONS, Unknown, read_entry
from mm_autoparallel.validation import nearest

MAIN = "main"
VERSIONS = ("0.3", "0.2", MAIN)
"""Generations; the last is the code of August 2026 (b5bcd76), which is in no release."""
TOKENS, STEP, LENGTH = "num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length"
ROUNDS = "num_pp_microbatches"
_STARTS = re.compile(r"torchtitan\.train\b|\bMODULE=\S+\s+CONFIG=")
PARALLELISM, TRAINING, RECOMPUTED = "PARALLELISM", "TRAINING", "RECOMPUTED"
"""What the planned.py that `export` writes assigns: sections, and the layers that run again."""


@dataclass(frozen=True)
class Config:
    """What decides. recompute: `full`, `none`, `selective`, every how many-th layer, or the layers' names.

    version: the generation, of VERSIONS; sections of the newest are in the keys of 0.3. notes: what was assumed.
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
        if path.suffix == ".sh":
            return _STARTS.search(read_text(path, "script", "shell")) is not None
        if path.suffix != ".py":
            return False
        text = read_text(path, "file", "Python")
        return "torchtitan" in text and ("Trainer.Config" in text or f"{PARALLELISM} =" in text)
    except PlannerError:
        return False


def read_config(path: Path, given: Given) -> Config:
    """The configuration at `path`. given: the function that is meant, where a file has several, and files beside it.

    Raises JobError naming what cannot be read without running it.
    """
    if path.suffix == ".sh":
        raise JobError(
            f"{path} starts torchtitan with a function of a registry, which is in another file; name that file, and "
            "the function with --entry; what stands behind --section.key goes into it"
        )
    if path.suffix != ".toml":
        if assigns(path, PARALLELISM):
            parallelism, training, recomputed = (read_literal(path, n) for n in (PARALLELISM, TRAINING, RECOMPUTED))
            return read_literals(parallelism, training, recomputed, str(path))
        return _read_registry(path, given)
    document, where = parse_toml(read_text(path, "configuration", "TOML"), str(path)), str(path)
    return read_document(document, where)


def read_literals(
    parallelism: Mapping[str, Any], training: Mapping[str, Any], recomputed: Sequence[str], where: str
) -> Config:
    """The configuration of what a planned.py assigns."""
    if ROUNDS not in parallelism:
        return Config("0.3", parallelism, training, tuple(recomputed))
    return Config(MAIN, *count_samples(parallelism, training, where), tuple(recomputed))


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


def _read_registry(path: Path, given: Given) -> Config:
    """The configuration of a function, in the keys of 0.3 whatever generation it is of."""
    settings = read_entry(path, given.beside, given.entry)
    for key, value in settings.items():
        if isinstance(value, Unknown):
            raise JobError(f"{value.where}, {key.partition('.')[2]} is known only when the file runs; write the value "
                           "itself there")  # fmt: skip
    sections = {
        name: {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{name}.")}
        for name in SECTIONS
    }
    texts = (read_text(each, "file", "Python") for each in (path, *given.beside))
    version = MAIN if any(map(counts_tokens, texts)) else "0.3"
    for name, values in sections.items():
        check_known(values, name, version, f"{path}: {name}")
    recompute = settings.get(AGAIN, "selective")  # Trainer.Config's own default
    parallelism, training = sections["parallelism"], sections["training"]
    if version == MAIN:
        parallelism, training = count_samples(parallelism, training, str(path))
    return Config(version, parallelism, training, recompute, _notes(recompute))


def counts_tokens(text: str) -> bool:
    """Whether a file's text has a key of the newest code alone."""
    return any(key in text for key in (TOKENS, STEP, LENGTH, ROUNDS))


def count_samples(
    parallelism: Mapping[str, Any], training: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sections in the keys of 0.3, of those of the newest code, which counts tokens where 0.3 counts samples.

    Raises PlanError where a micro-batch, or the batch, is no whole number of samples of max_context_length.
    """
    length = size_at(training, LENGTH, where, 2048)
    rounds = size_at(parallelism, ROUNDS, where) if size_at(parallelism, "pipeline_parallel_degree", where) > 1 else 1
    tokens = size_at(training, TOKENS, where, 16384)
    step = training.get(STEP, -1)
    step = None if step == -1 else size_at(training, STEP, where)
    for key, count in ((TOKENS, tokens), (STEP, step)):
        if count is not None and count % length:
            raise PlanError(f"{where}: {key} {count} is no multiple of {LENGTH} {length}; plans hold whole samples")
    rest = {key: value for key, value in parallelism.items() if key != ROUNDS}
    others = {key: value for key, value in training.items() if key not in (LENGTH, TOKENS, STEP)}
    batches = {"local_batch_size": tokens // length * rounds, "seq_len": length}
    batches |= {"global_batch_size": step // length} if step else {}
    return rest | {"pipeline_parallel_microbatch_size": tokens // length}, others | batches


def count_tokens(
    parallelism: Mapping[str, Any], training: Mapping[str, Any], length: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sections in the keys of the newest code, of those of 0.3: `count_samples` the other way. length: tokens of a
    sample."""
    renamed = ("pipeline_parallel_microbatch_size", "local_batch_size", "global_batch_size", "seq_len")
    sizes = {key: value for key, value in parallelism.items() if key not in renamed}
    others = {key: value for key, value in training.items() if key not in renamed}
    local = training["local_batch_size"]
    mbs = parallelism.get("pipeline_parallel_microbatch_size") or local
    counts = {TOKENS: mbs * length, STEP: training["global_batch_size"] * length, LENGTH: length}
    return sizes | {ROUNDS: local // mbs}, others | counts


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
    ("parallelism", MAIN): f"{_PARALLELISM} enable_fsdp_symm_mem enable_sequence_parallel spmd_backend "
    f"context_parallel_ptrr_mask_key {ROUNDS}".replace("pipeline_parallel_microbatch_size ", ""),
    ("training", MAIN): f"{TOKENS} {STEP} {LENGTH} {_TRAINING} disable_cuda_graphs".replace(
        "local_batch_size global_batch_size seq_len ", ""
    ),
}
"""Section, generation → its keys (config/job_config.py of 0.2.2, config/configs.py of 0.3.0 and of b5bcd76)."""
