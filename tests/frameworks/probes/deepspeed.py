"""What DeepSpeed makes of a configuration and of planned_layers.py: run by its own environment (held_against.py)."""

import contextlib
import io
import json
import os
import sys
import types

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "DS_BUILD_OPS": "0", "RANK": "0", "WORLD_SIZE": "1"}
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import deepspeed.comm
    import torch
    from deepspeed.runtime import config as of_config
    from torch.testing._internal.distributed.fake_pg import FakeStore


def ask(files, world_size):
    """Batches and ZeRO that the engine would take; of a pipeline, the parts and what each stage checkpoints."""
    document = json.loads(files["ds_config.json"])
    pieces = {"__name__": "planned_layers"}
    exec(compile(files["planned_layers.py"], "planned_layers.py", "exec"), pieces)
    layers = pieces["PLAN"]["text"]["layers"]
    tp, sp = document.get("tensor_parallel", {}).get("autotp_size", 1), document.get("sequence_parallel_size", 1)
    dp = world_size // (tp * sp * len(layers))
    mpu = types.SimpleNamespace(get_data_parallel_world_size=lambda: dp)
    of_config.dist = types.SimpleNamespace(get_rank=lambda *_: 0, get_world_size=lambda *_: world_size)
    config = of_config.DeepSpeedConfig(document, mpu)
    offload = config.zero_config.offload_optimizer
    found = {
        "batch": config.train_batch_size,
        "mbs": config.train_micro_batch_size_per_gpu,
        "micro_batches": config.gradient_accumulation_steps,
        "zero": int(config.zero_config.stage),
        "offload": bool(offload) and str(offload.device).endswith("cpu"),
        "tp": config.tensor_parallel_config.autotp_size or 1,
    }
    if len(layers) > 1:
        found["stages"] = [build_stage(pieces, layers, stage, dp) for stage in range(len(layers))]
    else:
        blocks = [torch.nn.Linear(1, 1) for _ in range(sum(layers))]
        own = [block.forward for block in blocks]
        pieces["checkpoint_layers"](blocks)
        found["again"] = [index for index, block in enumerate(blocks) if block.forward != own[index]]
    return found


def build_stage(pieces, layers, stage, dp):
    """How many layers a rank of `stage` builds, and which of them it runs again."""
    world_size = len(layers) * dp
    deepspeed.comm.comm.cdb = None
    torch.distributed.init_process_group("fake", rank=stage * dp, world_size=world_size, store=FakeStore())
    try:
        deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, dist_init_required=False)
        blocks = [torch.nn.Linear(1, 1) for _ in range(sum(layers) + 2)]
        module = pieces["PlannedPipelineModule"](blocks, first_layer=1)
        again = [index for index, func in enumerate(module.forward_funcs) if module._is_checkpointable([func])]
        return [module.parts[stage], module.parts[stage + 1], again]
    finally:
        torch.distributed.destroy_process_group()


for line in sys.stdin:
    question = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            answer = ask(question["files"], question["world_size"])
        except (Exception, SystemExit) as failure:
            answer = {"refused": f"{type(failure).__name__}: {failure}"}
    print(json.dumps(answer), flush=True)
