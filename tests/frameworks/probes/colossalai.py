"""What Colossal-AI makes of planned_plugin.py: run by its own environment (held_against.py), without a GPU."""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import sys
import types

STANDINS = ("bitsandbytes", "galore_torch")
"""Optimizers that need a GPU to be installed; the plugin builds none."""


class Standin(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        found = name.partition(".")[0] in STANDINS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        return Standin(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, Finder())
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import colossalai.booster.plugin  # noqa: F401 - all of it before the first question
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

LAYERS = 24


def build(files, rank, world_size):
    """The plugin as `rank` builds it."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    pieces = {"__name__": "planned_plugin"}
    exec(compile(files["planned_plugin.py"], "planned_plugin.py", "exec"), pieces)
    return pieces["plugin"]()


def ask(files, world_size):
    """Sizes and, of a pipeline, the layers of each stage and how many of them run again."""
    plugin = build(files, 0, world_size)
    try:
        shard = plugin.shard_config
        shares = plugin.enable_sequence_parallelism
        found = {
            "sizes": [plugin.tp_size, plugin.pp_size, plugin.sp_size, plugin.pg_mesh.shape[plugin.dp_axis]],
            "zero": plugin.zero_stage,
            "offload": plugin.cpu_offload,
            "mode": plugin.sequence_parallelism_mode if shares else None,
        }
        if plugin.pp_size == 1:
            return found
        stages, chunks = plugin.stage_manager, plugin.stage_manager.num_model_chunks
        held, again = stages.distribute_layers(LAYERS), shard.gradient_checkpoint_config
        counts = [
            again.get_num_ckpt_layers(stage, plugin.pp_size, held[chunk * plugin.pp_size + stage], chunk, chunks)
            for chunk in range(chunks if again else 0)
            for stage in range(plugin.pp_size)
        ]
        keywords = json.loads(files["plugin.json"])
        if keywords["microbatch_size"] != plugin.scheduler.microbatch_size:
            raise ValueError("plugin.json and planned_plugin.py differ")
        return found | {
            "next": torch.distributed.get_process_group_ranks(plugin.pp_group)[1],
            "mbs": plugin.scheduler.microbatch_size,
            "held": held,
            "again": counts if any(counts) else [],
        }
    finally:
        torch.distributed.destroy_process_group()


for line in sys.stdin:
    question = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            answer = ask(question["files"], question["world_size"])
        except (Exception, SystemExit) as failure:
            answer = {"refused": f"{type(failure).__name__}: {failure}"}
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    print(json.dumps(answer), flush=True)
