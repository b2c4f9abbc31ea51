"""What keys of a pretrain YAML say of its memory beside sizes: shards, masks, what trains, and who divides it."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from mm_autoparallel.integrations.mindformers.model_section import WHAT
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.records import Count, Noun
from mm_autoparallel.validation import parse_record

_AUTO_PARALLEL = (2, "2", "auto_parallel")
"""`parallel.parallel_mode` under which MindSpore finds strategies by itself."""


_PREFIXES = ("ptuning2", "prefixtuning")
"""`pet_type` of tuned prefixes."""


class _Part(Noun):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class _Adapters(_Part):
    pet_type: str = "lora"
    lora_rank: Count = 8
    pre_seq_len: Count = 128


class _Widths(_Part):
    hidden_size: Count
    num_heads: Count | None = None
    n_kv_heads: Count | None = None


def division_notes(pretrain: Pretrain) -> list[str]:
    """What whoever divides the model anew should know of a YAML that MindSpore divides by itself."""
    if not _divides_itself(pretrain):
        return []
    return [
        "parallel.parallel_mode is 2: MindSpore divides layers by itself there; what is planned, and written, are the "
        "sizes of parallel_config, which hold with parallel_mode 1"
    ]


def batch_notes(pretrain: Pretrain, global_batch_size: int) -> list[str]:
    """That a global batch size is another than the YAML's."""
    if global_batch_size == pretrain.global_batch_size:
        return []
    return [
        f"--gbs {global_batch_size} takes the place of the YAML's own global batch of {pretrain.global_batch_size} "
        f"(--gbs {pretrain.global_batch_size} keeps it)"
    ]


def _divides_itself(pretrain: Pretrain) -> bool:
    parallel = pretrain.document.get("parallel")
    return isinstance(parallel, dict) and parallel.get("parallel_mode") in _AUTO_PARALLEL


def check_division(pretrain: Pretrain) -> None:
    """Raise JobError where MindSpore divides the model by itself, and the YAML does not say over how many devices."""
    sizes = pretrain.document.get("parallel_config")
    if not isinstance(sizes, dict):
        return
    if _divides_itself(pretrain) and not {"data_parallel", "model_parallel"} & sizes.keys():
        raise pretrain.error(
            "parallel.parallel_mode",
            "is 2, with which MindSpore divides the model by itself, and parallel_config gives neither data_parallel "
            "nor model_parallel, so neither its devices nor its memory are known; give the sizes to begin with (and "
            "parallel_mode: 1, with which they hold)",
        )


def adapter_type(pretrain: Pretrain) -> str | None:
    """The kind of adapters (`pet_config`) that train in place of the model; None where all of it trains."""
    config = _model_keys(pretrain).get("pet_config")
    return parse_record(_Adapters, config, WHAT, pretrain.path).pet_type if isinstance(config, dict) else None


def adapter_fraction(pretrain: Pretrain) -> float | None:
    """What adapters of a layer count at most, as a share of its parameters; None where it is not known.

    Of a matrix of a rows and b columns low-rank adapters of rank r count r (a + b), which is at most 2 r / min(a, b) of
    it (LoRA, Hu et al. 2022, arXiv:2106.09685). Tuned prefixes of L tokens (P-tuning v2, Liu et al. 2022,
    arXiv:2110.07602) have a key and a value of each, 2 L h beside the more than 2 h² of a layer of width h. Known for
    models without latent attention.
    """
    config, kind = _model_keys(pretrain), adapter_type(pretrain)
    if kind not in ("lora", *_PREFIXES) or _is_latent(pretrain) or "hidden_size" not in config:
        return None
    adapters = parse_record(_Adapters, config["pet_config"], WHAT, pretrain.path)
    sizes = parse_record(_Widths, config, WHAT, pretrain.path)
    if kind in _PREFIXES:
        return min(1.0, adapters.pre_seq_len / sizes.hidden_size)
    if sizes.num_heads is None:  # under another name
        return None
    narrowest = sizes.hidden_size / sizes.num_heads * (sizes.n_kv_heads or sizes.num_heads)
    return min(1.0, 2 * adapters.lora_rank / narrowest)


def adds_up_gradients(pretrain: Pretrain) -> bool:
    """Whether gradients add up over micro-batches, for which they stay whole."""
    return pretrain.pp > 1 or pretrain.gradient_accumulation_steps > 1


def shards_added_gradients(pretrain: Pretrain) -> bool:
    """Whether gradients that add up are kept as shards (gradient_accumulation_shard, of optimizer parallel)."""
    parallel = pretrain.document.get("parallel")
    config = parallel.get("parallel_optimizer_config") if isinstance(parallel, dict) else None
    return (
        pretrain.optimizer_parallel and isinstance(config, dict) and config.get("gradient_accumulation_shard") is True
    )


def _model_keys(pretrain: Pretrain) -> dict[str, Any]:
    model = pretrain.document.get("model")
    keys = model.get("model_config") if isinstance(model, dict) else None
    return keys if isinstance(keys, dict) else {}


def deals_whole_experts(pretrain: Pretrain) -> bool:
    """Whether tensor parallel ranks are expert parallel ones too, each with whole experts, as Telechat's layers have it
    (research/telechat2/telechat_transformer.py; since May 2025 where moe_config.ep_extend_tp, its default).
    """
    moe = pretrain.document.get("moe_config")
    extended = moe.get("ep_extend_tp", True) if isinstance(moe, dict) else True
    return pretrain.has_experts and _model_keys(pretrain).get("type") == "TelechatConfig" and extended is not False


def resembles_deepseek(pretrain: Pretrain) -> bool:
    """Whether the model has experts and, as far as the YAML itself tells, latent attention: where sizes stand elsewhere
    (no config class, today's YAMLs), it may.
    """
    return pretrain.has_experts and (_is_latent(pretrain) or "type" not in _model_keys(pretrain))


def _is_latent(pretrain: Pretrain) -> bool:
    return _model_keys(pretrain).get("kv_lora_rank") is not None
