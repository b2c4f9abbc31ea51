"""The training that flags of Megatron-LM's pretrain_gpt.py start, wherever they stand: model, workload, search."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.dialect import Dialect
from mm_autoparallel.integrations.megatron_core.known_flags import tell_unknown
from mm_autoparallel.integrations.megatron_core.passed import Passed
from mm_autoparallel.integrations.megatron_core.read import (
    check_strangers,
    read_choices,
    read_context,
    read_operators,
    read_plan,
)
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_arguments import read_megatron_arguments
from mm_autoparallel.model.readers.megatron_precision import read_megatron_precision
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.validation import describe_unfit

_LOCAL = ("--spec", "local")
"""Layers of megatron-core's own in the place of TransformerEngine's; other specifications are other models."""

_REPEATED = {True: {"repeated_groups": "always"}, False: {"repeated_groups": "fewer"}}
"""By whether a script has DeepSpeed's experts: MindSpeed-LLM 1.0 to 2.2, which have them, with
--kv-head-repeat-before-uly-alltoall, on by default (ulysses_context_parallel_forward_wrapper of core/transformer/
dot_product_attention.py); MindSpeed to 26.1 (core/context_parallel, UlyssesContextAttention.forward)."""

_VOCABULARY = "--vocab-size"

_MOST_EXPERTS_RANKS = 64
"""EP that a search tries where nobody says how many devices there are. Assumed."""


def describe_training(spelt: Passed, given: Given, dialect: Dialect, in_fp32: bool = False) -> Described:
    """Model, workload and search space of the training that the flags `spelt` start, as `dialect` spells them.

    given.world_size: devices that are planned for, where that is known. in_fp32: such a training is understood too;
    the workload then has its bytes. Raises JobError or PlanError naming the flag that is missing, malformed or not
    planned.
    """
    passed = dialect.read(spelt)
    check_strangers(passed)
    if given.image_tokens is not None or given.images is not None:
        raise JobError(
            f"{passed.where}: it trains a decoder alone, whose samples have no images; leave their number out"
        )
    if not in_fp32:
        check_precision(passed)
    model = read_trained_model(passed, given)
    workload, notes = read_workload(passed, model, given.world_size, dialect)
    notes += (*dialect.note(spelt), *tell_unknown(spelt))
    search: dict[str, object] = {"max_vpp": given.max_vpp or 1}
    experts = model.text.layers.experts
    if experts:
        most = min(experts.num_experts, given.world_size or _MOST_EXPERTS_RANKS)
        search["ep"] = [2**k for k in range(most.bit_length()) if experts.num_experts % 2**k == 0 and 2**k <= most]
    if passed.has("--rampup-batch-size"):
        notes += (f"--rampup-batch-size makes the first steps smaller; planned are those of {flags.GLOBAL_BATCH}",)
    source = given.model_config if given.model_config is not None else model
    return Described(
        source,
        workload,
        search,
        world_size=given.world_size,
        notes=notes,
        adapters=dialect.adapters(spelt),
        keeps_less=tuple(flag for flag in sorted(dialect.keeps_less) if spelt.has(flag)),
    )


def check_precision(passed: Passed) -> None:
    """Raises JobError where neither of the 16-bit types is asked for."""
    if not _is_16_bit(passed):
        raise JobError(
            f"{passed.where}: neither {flags.BF16} nor --fp16 is passed, and training in fp32 is not planned"
            f"{passed.unset()}"
        )


def _is_16_bit(passed: Passed) -> bool:
    return passed.has(flags.BF16) or passed.has("--fp16")


def read_trained_model(passed: Passed, given: Given) -> Model:
    """That of the flags, or of the file that a person names in their place."""
    if given.model_config is not None:
        model = read_model(given.model_config)
        if not isinstance(model, Model):
            raise JobError(f"model file {given.model_config}: it is known from traces alone; give one with its sizes")
        said = passed.number(flags.NUM_LAYERS)
        if said not in (None, model.text.layers.num_layers):
            raise JobError(
                f"{passed.where}: {flags.NUM_LAYERS} is {said}, and {given.model_config} has "
                f"{model.text.layers.num_layers} layers; give the model that the script trains"
            )
        return model
    for flag in (flags.NUM_LAYERS, "--hidden-size", "--num-attention-heads"):
        if passed.number(flag) is None:
            raise JobError(f"{passed.where}: it does not pass {flag}; name the model's own file with --model")
    document = {key: value for key, value in passed.document().items() if (key, value) != _LOCAL}
    if given.vocab_size is not None:
        if passed.has(_VOCABULARY):
            raise JobError(f"{passed.where}: it passes {_VOCABULARY} itself; leave out the one beside it")
        document[_VOCABULARY] = given.vocab_size
    section = Section(document, passed.script.path, what="launch script")
    try:
        return read_megatron_arguments(section)
    except ValidationError as failure:
        raise JobError(f"{passed.where}: its flags make no model: {describe_unfit(failure)}") from None
    except JobError as failure:
        if failure.key != "vocab_size":
            raise
        raise JobError(
            f"{passed.where}: how many tokens its vocabulary has is its tokenizer's to say; say it with "
            f"{_VOCABULARY} N, here or in the script, or name the model's own file"
        ) from None


def read_workload(
    passed: Passed, model: Model, world_size: int | None, dialect: Dialect
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Sections of a job, and a sentence for what was assumed."""
    document = passed.document()
    try:
        low = read_megatron_precision(document)
    except ValueError as failure:
        raise JobError(f"{passed.where}: {failure}") from None
    choices = read_choices(passed)
    seq_length, batch = passed.number("--seq-length"), passed.number(flags.GLOBAL_BATCH)
    notes: tuple[str, ...] = ()
    if seq_length is None:
        raise JobError(f"{passed.where}: it does not pass --seq-length; a whole number is expected")
    if batch is None:
        if world_size is None:
            raise JobError(f"{passed.where}: it does not pass {flags.GLOBAL_BATCH}; a whole number is expected")
        batch = read_plan(passed, world_size, model.text.layers.num_layers).global_batch_size
        notes += (f"{flags.GLOBAL_BATCH} is not passed: it is MBS x DP, {batch}",)
    facts = dict(low.facts)
    experts = model.text.layers.experts
    facts |= {
        name: choices[name] for name in ("dispatcher", "graphs") if choices[name] and (experts or name == "graphs")
    }
    facts |= {"tp_overlap": choices["tp_overlap"]} if choices["tp_overlap"] else {}
    local = passed.text("--transformer-impl") == "local" or document.get(_LOCAL[0]) == _LOCAL[1]
    backend = passed.text("--attention-backend") or "auto"
    flash = passed.has("--use-flash-attn") if local else backend not in ("unfused", "local")
    operators = read_operators(passed)
    said: dict[str, Any] = {
        "global_batch_size": batch,
        "seq_length": seq_length,
        "stack": dialect.stack or ("megatron-local" if local else "megatron-te"),
        "attention": "flash" if flash else "unfused",
        "hidden_dropout": _drops(passed, "--hidden-dropout"),
        "attention_dropout": _drops(passed, "--attention-dropout"),
        "overlap_grad_reduce": passed.has(flags.OVERLAP_REDUCE),
        "overlap_param_gather": passed.has(flags.OVERLAP_GATHER),
        "overlap_p2p": not passed.has(flags.NO_P2P_OVERLAP),
        "gradient_fusion": not passed.has("--no-gradient-accumulation-fusion"),
    }
    said |= {} if _is_16_bit(passed) else {"weight_bytes": 4.0, "gradient_bytes": 4.0, "optimizer_bytes": 8.0}
    said |= {"gradient_bytes": 2.0} if passed.has("--fp16") or passed.has("--grad-reduce-in-bf16") else {}
    said |= {"recompute_operators": [*operators]} if operators else {}
    said |= {"deterministic": True} if passed.has("--deterministic-mode") else {}
    said |= {"precision": low.precision} if low.precision != "bf16" else {}
    said |= {"overlap_all_to_all": choices["overlap_all_to_all"]} if experts else {}
    if passed.has(flags.DEEPSPEED_EXPERTS):
        said |= {"ep_kind": "deepspeed", "token_rearrange": passed.has(flags.REARRANGED)}
        said |= {"expert_capacity_factor": float(passed.text(flags.CAPACITY) or 1)}
    if passed.has("--cross-entropy-loss-fusion") and passed.text("--cross-entropy-fusion-impl") == "te":
        said["cross_entropy"] = "fused"
    if (passed.number(flags.CONTEXT) or 1) > 1:
        said["context_parallel"] = read_context(passed)
        deals = dialect.stack == "mindspeed" and said["context_parallel"] in ("all_to_all", "hierarchical")
        facts |= _REPEATED[passed.has(flags.DEEPSPEED_EXPERTS)] if deals else {}
        sizes = passed.list(flags.CONTEXT_SIZES)
        said |= {"dealing_ranks": int(sizes[0])} if sizes and sizes[0].isdigit() else {}
    said |= {"facts": facts} if facts else {}
    return said, notes


def _drops(passed: Passed, flag: str) -> bool:
    """Megatron-LM drops a tenth where nothing is said."""
    text = passed.text(flag) or "0.1"
    try:
        return float(text) > 0
    except ValueError:
        raise JobError(f"{passed.where}: {flag} is {text!r}; a number is expected") from None
