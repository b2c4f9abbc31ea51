"""Good configurations of every framework, in which `lint` finds nothing, and mistakes that are put into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seeded import Mistake

from mm_autoparallel.integrations.described import Given

DENSE: dict[str, Any] = {
    "num-layers": 26,
    "hidden-size": 2048,
    "ffn-hidden-size": 8192,
    "num-attention-heads": 32,
    "group-query-attention": True,
    "num-query-groups": 8,
    "max-position-embeddings": 8192,
    "swiglu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "untie-embeddings-and-output-weights": True,
    "padded-vocab-size": 32000,
}
EXPERTS = DENSE | {"num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 1024, "moe-grouped-gemm": True}
MODELS = {
    "dense": DENSE,
    "experts": EXPERTS,
    "heads": DENSE | {"num-attention-heads": 30, "num-query-groups": 30, "hidden-size": 1920},
    "27 layers": DENSE | {"num-layers": 27},
    "wide": DENSE | {"hidden-size": 8192, "ffn-hidden-size": 28672, "num-attention-heads": 64},
}
"""Name → Megatron-LM's flags of a decoder, which a person names beside a configuration."""


@dataclass(frozen=True)
class Case(Mistake):
    """A mistake in a configuration. model: of MODELS. given: what is said otherwise."""

    model: str = "dense"
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A framework's form of a configuration: its file's name, a good one, what is said beside it, mistakes by name."""

    framework: str
    name: str
    good: str
    given: Mapping[str, Any]
    mistakes: Mapping[str, Case]

    def write(self, folder: Path, text: str, case: Case | None = None) -> tuple[Path, Given]:
        """`text` as its file, and what is said beside it."""
        said = {**self.given, **(case.given if case else {})}
        if said.pop("model", True):
            model = folder / "model.json"
            model.write_text(json.dumps(MODELS[case.model if case else "dense"]), encoding="utf-8")
            said["model_config"] = model
        path = folder / self.name
        path.write_text(text, encoding="utf-8")
        return path, Given(**said)


FROM_16 = {"world_size": 16, "seq_length": 4096}

DEEPSPEED = Format(
    "deepspeed",
    "ds_config.json",
    """{
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {
        "enabled": true
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": true
    }
}
""",
    FROM_16,
    {
        "batch": Case("batch-divisible", {'"train_batch_size": 128': '"train_batch_size": 130'},
                      "train_batch_size: 128", "train_batch_size"),
        "world": Case("world-size", {'"bf16"': '"tensor_parallel": {"autotp_size": 3},\n    "bf16"'},
                      "--world-size 18", "autotp_size", frozenset({"heads-divisible"})),
        "heads": Case("heads-divisible", {'"bf16"': '"tensor_parallel": {"autotp_size": 4},\n    "bf16"',
                                          '128': '32'}, "", "autotp_size", model="heads"),
        "sequence": Case("sequence-divisible", {'"bf16"': '"sequence_parallel_size": 8,\n    "bf16"', '128': '16'},
                         "--seq-length 4104", given={"seq_length": 4100}),
        "positions": Case("sequence-positions", {}, given={"seq_length": 16384},
                          also=frozenset({"out-of-memory"})),
        "both precisions": Case("flags-contradict", {'"bf16": {': '"fp16": {\n        "enabled": true\n    },\n    "bf16": {'},
                                "", "bf16"),
        "of stage 3": Case("flag-without-effect", {'"stage": 2,': '"stage": 2,\n        "stage3_max_live_parameters": 1000,'},
                           "zero_optimization.stage 3", "stage3_max_live"),
        "offloaded weights": Case("flag-without-effect",
                                  {'"stage": 2,': '"stage": 2,\n        "offload_param": {"device": "cpu"},'},
                                  "zero_optimization.stage 3", "device"),
        "misspelt": Case("misspelt-flag", {'"overlap_comm"': '"overlap_com"'}, "overlap_comm", "overlap_com"),
        "misspelt at the top": Case("misspelt-flag", {'"gradient_clipping"': '"gradient_cliping"'},
                                    "gradient_clipping", "gradient_cliping"),
        "deprecated": Case("deprecated-flag", {'"stage": 2,': '"stage": 2,\n        "cpu_offload": true,'},
                           "zero_optimization.offload_optimizer", "cpu_offload"),
        "twice": Case("key-twice", {'"gradient_clipping": 1.0,': '"gradient_clipping": 1.0,\n    "gradient_clipping": 2.0,'},
                      "", "2.0"),
        "memory": Case("out-of-memory", {}, model="wide"),
        "level": Case("tensor-across-level", {'"bf16"': '"tensor_parallel": {"autotp_size": 16},\n    "bf16"', '128': '8'},
                      "", "autotp_size", frozenset({"heads-divisible"})),
        "unsharded": Case("optimizer-not-sharded", {'"stage": 2': '"stage": 0'}, "zero_optimization.stage: 1", "stage"),
        "not read": Case("not-read", {'"bf16"': '"unheard_of": 1,\n    "bf16"'}, at="unheard_of"),
    },
)
