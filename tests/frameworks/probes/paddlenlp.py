"""What PaddleNLP makes of a trainer's arguments: run by its own environment (held_against.py)."""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import tempfile
import types

STANDINS = ("aistudio_sdk", "fastapi", "jieba", "paddle2onnx", "paddlefsl", "rouge", "seqeval", "tool_helpers")
STANDINS += ("uvicorn", "visualdl")
"""What its trainer's arguments do not use."""


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
os.environ["LOCAL_RANK"] = "0"
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import paddle.distributed
    from paddle.distributed import fleet
    from paddlenlp.trainer import PdArgumentParser, TrainingArguments

given = {}


def init(is_collective=True, strategy=None, **_):
    """In place of fleet.init, which would wait for the other ranks."""
    fleet.fleet._user_defined_strategy = given["strategy"] = strategy


fleet.init = init
paddle.distributed.init_parallel_env = lambda: None


def ask(files, world_size):
    """Sizes, order and batches that fleet is asked for."""
    paddle.distributed.get_world_size = lambda *_: world_size
    os.environ["PADDLE_TRAINERS_NUM"] = str(world_size)
    with tempfile.TemporaryDirectory() as folder:
        document = json.loads(files["arguments.json"]) | {"output_dir": folder, "local_rank": 0}
        (trained,) = PdArgumentParser((TrainingArguments,)).parse_dict(document)
    asked = given["strategy"].hybrid_configs if trained.use_hybrid_parallel else {}
    return {
        "tp": max(trained.tensor_parallel_degree, 1),
        "pp": max(trained.pipeline_parallel_degree, 1),
        "sep": max(trained.sep_parallel_degree, 1),
        "sequences": trained.sequence_parallel,
        "sharding": [str(each.value) for each in trained.sharding],
        "batch": trained.train_batch_size * trained.gradient_accumulation_steps * trained.dataset_world_size,
        "again": trained.recompute,
        "fleet": [asked.get(f"{key}_degree", 1) for key in ("dp", "mp", "pp", "sharding", "sep")],
        "outside": trained.hybrid_parallel_topo_order,
    }


for line in sys.stdin:
    question = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            answer = ask(question["files"], question["world_size"])
        except (Exception, SystemExit) as failure:
            answer = {"refused": f"{type(failure).__name__}: {failure}"}
    print(json.dumps(answer), flush=True)
