"""What Megatron-Bridge makes of overrides: run by its own environment (held_against.py).

Libraries that need a GPU to be installed are stand-ins: modules whose every name is a class.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

STAND_INS = (
    *("transformer_engine", "transformer_engine_torch", "mamba_ssm", "modelopt", "nvidia_resiliency_ext", "fla"),
    *("causal_conv1d", "timm", "open_clip", "mlflow", "wandb", "datasets", "accelerate", "qwen_vl_utils", "nvtx"),
    *(
        "tensorboard",
        "tensorstore",
        "grouped_gemm",
        "flashinfer",
        "nemo_run",
        "apex",
        "multistorageclient",
        "zarr",
        "PIL",
        "torchvision",
    ),
)


class Named(type):
    """Every attribute of such a class is one too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})

    def __getitem__(cls, _):
        return cls

    def __call__(cls, *_, **__):
        return object.__new__(cls)


class Module(types.ModuleType):
    """Every name in it is a class."""

    __path__ = ()
    __version__ = "2.10.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Behind all others: what is not installed and named above."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in STAND_INS and not name.startswith("megatron.energon"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import torch
    from megatron.bridge.models import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build


def make_recipe(experts, length):
    """A recipe of the decoder that plans are drawn for, as Megatron-Bridge's own are made."""
    config = _pretrain_common()
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", 511
    config.checkpoint.save = config.checkpoint.load = None
    kinds = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512} if experts else {}
    config.model = GPTModelProvider(
        num_layers=24,
        hidden_size=256,
        ffn_hidden_size=512,
        num_attention_heads=8,
        seq_length=length,
        vocab_size=512,
        add_bias_linear=False,
        normalization="RMSNorm",
        share_embeddings_and_output_weights=False,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        params_dtype=torch.bfloat16,
        **kinds,
    )
    config.dataset.seq_length = length
    return config


def ask(files, world_size):
    """The configuration behind its own checks: sizes, batches, sharding, and the layers of each stage and chunk."""
    experts = "expert_tensor_parallel_size: null" not in files["planned.yaml"]
    both = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"WORLD_SIZE": str(world_size)}):
        path = Path(folder, "planned.yaml")
        path.write_text(files["planned.yaml"])
        words = [line for line in files["overrides.txt"].splitlines() if line and not line.startswith("#")]
        for given in ({"config_filepath": str(path)}, {"cli_overrides": words}):
            config = process_config_with_overrides(make_recipe(experts, 256), **given)
            with (
                mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
                mock.patch("torch.cuda.get_device_properties", return_value=types.SimpleNamespace(major=9)),
            ):
                config.validate()
            both.append(describe(config))
    return {"yaml": both[0], "words": both[1]}


def describe(config):
    """What is held against a plan."""
    model, pp = config.model, config.model.pipeline_model_parallel_size
    vpp = model.virtual_pipeline_model_parallel_size or 1
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
    counts = []
    for chunk in range(vpp):
        for stage in range(pp):
            parallel_state.set_pipeline_model_parallel_rank(stage)
            counts.append(get_num_layers_to_build(model, vp_stage=chunk if vpp > 1 else None, pp_rank=stage))
    number = model.recompute_num_layers if model.recompute_granularity == "full" else 0
    sharding = config.ddp.data_parallel_sharding_strategy if config.ddp.use_megatron_fsdp else None
    return {
        "pp": pp,
        "tp": model.tensor_model_parallel_size,
        "cp": model.context_parallel_size,
        "ep": model.expert_model_parallel_size,
        "dp": config.data_parallel_size,
        "vpp": vpp,
        "mbs": config.train.micro_batch_size,
        "batch": config.train.global_batch_size,
        "sequences": model.sequence_parallel,
        "zero": sharding or int(config.ddp.use_distributed_optimizer and config.optimizer.use_distributed_optimizer),
        "offloaded": config.optimizer.optimizer_cpu_offload,
        "outside": config.dist.use_tp_pp_dp_mapping,
        "layers": counts,
        "recompute": [min(number, held) for held in counts],
    }


for line in sys.stdin:
    question = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            answer = ask(question["files"], question["world_size"])
        except (Exception, SystemExit) as failure:
            answer = {"refused": f"{type(failure).__name__}: {failure}"}
    print(json.dumps(answer), flush=True)
