"""Logs in the forms of five frameworks, with made-up numbers: what each prints, and nothing of anybody's run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STEPS_MS = (4100.0, 1203.0, 1199.0, 1201.0, 1200.0, 1900.0, 1202.0, 1198.0, 1200.0, 1201.0)
"""Warm-up first, 1,200 ms, and one checkpoint."""

DENSE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 16,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 64,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "encoder_num_layers": 8,
    "encoder_seq_length": 2048,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tokenizer_type": "HuggingFaceTokenizer",
    "vocab_size": None,
    "num_experts": None,
    "world_size": 8,
    "data_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "sequence_parallel": True,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "bf16": True,
    "fp16": False,
    "fp8": None,
    "transformer_impl": "transformer_engine",
    "attention_backend": "AttnBackend.auto",
    "use_flash_attn": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "gradient_accumulation_fusion": True,
    "optimizer": "adam",
    "use_mcore_models": True,
    "data_path": ["/data/text"],
}
"""Arguments of a small decoder on eight devices."""


def arguments_block(arguments: Mapping[str, Any]) -> list[str]:
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(arguments.items())]
    return [
        "------------------------ arguments ------------------------",
        *lines,
        "-------------------- end of arguments ---------------------",
    ]


def iteration_line(number: int, step_ms: float, batch: int, more: str = "") -> str:
    return (
        f" [2030-01-01 00:00:00] iteration {number:8d}/     100 | consumed samples: {number * batch:12d} | elapsed "
        f"time per iteration (ms): {step_ms:.1f} |{more} learning rate: 1.000000E-05 | global batch size: {batch:5d} | "
        "lm loss: 9.000000E+00 | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | number "
        "of nan iterations:   0 |"
    )


def megatron(
    steps_ms: Sequence[float] = STEPS_MS,
    padded: int | None = 32000,
    peaks: Mapping[int, float] | None = None,
    more: Sequence[str] = (),
    **changed: Any,
) -> str:
    """A log of Megatron-LM. padded: of the vocabulary. peaks: rank → MiB. more: lines before the first step."""
    arguments = {name: value for name, value in (DENSE | changed).items() if value is not ...}
    lines = [
        f"using world size: {arguments['world_size']}, data-parallel size: 2, context-parallel size: 1",
        *arguments_block(arguments),
    ]
    if padded is not None:
        lines.append(f" > padded vocab (size: {padded - 2}) with 2 dummy tokens (new size: {padded})")
    lines += more
    for number, step_ms in enumerate(steps_ms, start=1):
        lines.append(iteration_line(number, step_ms, int(arguments["global_batch_size"])))
        if number == 2:
            lines += [
                f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 100.0 | max allocated: {mib} | reserved: "
                f"{2 * mib} | max reserved: {2 * mib}"
                for rank, mib in (peaks or {}).items()
            ]
    return "\n".join(lines) + "\n"


def megatron_deepspeed(steps_ms: Sequence[float] = STEPS_MS, **changed: Any) -> str:
    """A log of Megatron-DeepSpeed started by pdsh, which names hosts: its own spellings, ZeRO by DeepSpeed's word."""
    own = {
        "deepspeed": True,
        "zero_stage": 1,
        "normalization": "rmsnorm",
        "num_key_value_heads": 4,
        "use_rotary_position_embeddings": True,
        "position_embedding_type": ...,
        "group_query_attention": ...,
        "num_query_groups": ...,
        "num_experts": [1],
        "transformer_impl": "local",
        "use_flash_attn_v2": True,
        "use_flash_attn": False,
        "use_distributed_optimizer": False,
        "sequence_parallel": False,
        "ds_sequence_parallel_size": 1,
        "overlap_p2p_comm": False,
        "attention_backend": ...,
    }
    text = megatron(steps_ms, **(own | changed))
    lines = ["[INFO] [launch.py:164:main] nnodes=1, num_local_procs=8, node_rank=0", *text.splitlines()]
    lines.insert(4, "other-host: op name ................ installed .. compatible")
    return "\n".join(f"node-1: {line}" for line in lines) + "\n"


def mindspeed_llm(steps_ms: Sequence[float] = STEPS_MS, **changed: Any) -> str:
    """A log of MindSpeed-LLM: Megatron-LM's arguments with some of MindSpeed's."""
    own = {
        "reuse_fp32_param": True,
        "use_fused_rmsnorm": True,
        "context_parallel_algo": "megatron_cp_algo",
        "num_layer_list": None,
        "transformer_impl": "local",
        "noop_layers": None,
        "spec": "['mindspeed_llm.tasks.models.spec.qwen2_spec', 'layer_spec']",
    }
    return megatron(steps_ms, **(own | changed))


TITAN_MODEL = (
    "Building llama3 toy with TransformerModelArgs(dim=1024, n_layers=8, n_heads=16, n_kv_heads=4, vocab_size=32000, "
    "multiple_of=256, ffn_dim_multiplier=None, norm_eps=1e-05, rope_theta=10000)"
)


def torchtitan(
    rates: Sequence[float] = (900, 9010, 9000, 8990, 9000, 9005, 8995),
    mesh: str = "Building 1-D device mesh with ['dp_shard'], [8]",
    model: str = TITAN_MODEL,
    device: str = "NVIDIA H100",
    batch: str = "local batch size 2, global batch size 16, gradient accumulation steps 1, sequence length 2048",
    more: Sequence[str] = (),
    ranks: Sequence[int] = (0,),
) -> str:
    """A log of torchtitan, of one rank or several at once. rates: tokens per second and device."""
    said = [mesh, model, f"CUDA capacity: {device} with 79.10GiB memory", *more]
    said += [f"Trainer is initialized with {batch}, total steps 100 (warmup 2)", "Training starts at step 1"]
    said += [
        f"\x1b[31mstep: {number:2}  \x1b[32mloss:  9.0000  \x1b[33mmemory: 20.00GiB(25.28%)  \x1b[34mtps: {rate:,.0f}  "
        f"\x1b[36mtflops: 20.00  \x1b[35mmfu: 2.00%\x1b[39m"
        for number, rate in enumerate(rates, start=1)
    ]
    return (
        "\n".join(
            f"[rank{rank}]:[titan] 2030-01-01 00:00:00,000 - root - INFO - {line}" for line in said for rank in ranks
        )
        + "\n"
    )


FOUNDRY = """max_seq_len: 2048
run_name: toy
model:
  name: mpt_causal_lm
  d_model: 1024
  n_heads: 16
  n_layers: 8
  expansion_ratio: 4
  max_seq_len: 2048
  vocab_size: 50368
  no_bias: true
  attn_config:
    attn_impl: flash
    alibi: true
optimizer:
  name: decoupled_adamw
  betas:
  - 0.9
  - 0.95
precision: amp_bf16
global_train_batch_size: 64
device_train_microbatch_size: 4
fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: PURE
  activation_checkpointing: true
n_gpus: 8
"""


def llm_foundry(
    rates: Sequence[float] = (0.2, 0.498, 0.5, 0.502, 0.5, 0.499), config: str = FOUNDRY, per_node: int = 8
) -> str:
    """A log of LLM Foundry. rates: batches per second."""
    lines = [
        "2030-01-01 00:00:00,000: rank0[1][MainThread]: INFO: llmfoundry.command_utils.train: Logging config",
        *config.splitlines(),
        "2030-01-01 00:00:00,000: rank0[1][MainThread]: INFO: llmfoundry.command_utils.train: Starting training...",
        "Config:",
        "num_gpus_per_node: " + str(per_node),
        "num_nodes: 1",
        "******************************",
    ]
    for number, rate in enumerate(rates, start=1):
        lines += [
            f"[batch={number}/100]:",
            f"\t Train time/batch: {number - 1}",
            "\t Train memory/peak_allocated_mem: 21.5",
            f"\t Train throughput/batches_per_sec: {rate:.4f}",
            f"\t Train throughput/device/tokens_per_sec: {rate * 64 * 2048 / 8:.4f}",
            "\t Train throughput/device/mfu: 0.1000",
        ]
    return "\n".join(lines) + "\n"
