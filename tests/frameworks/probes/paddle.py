"""What PaddleFormers makes of a trainer's arguments: run by its own environment (held_against.py)."""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile

os.environ["LOCAL_RANK"] = "0"
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import paddle.distributed
    import yaml
    from paddle.distributed import fleet
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SegmentLayers
    from paddleformers.cli.hparams import get_train_args

given = {}


def init(is_collective=True, strategy=None, **_):
    """In place of fleet.init, which would wait for the other ranks."""
    fleet.fleet._user_defined_strategy = given["strategy"] = strategy


fleet.init = init


def ask(files, world_size):
    """Sizes, order and batches that fleet is asked for; of uneven stages, where paddle's own cut puts them."""
    paddle.distributed.get_world_size = lambda *_: world_size
    os.environ["PADDLE_TRAINERS_NUM"] = str(world_size)
    with tempfile.TemporaryDirectory() as folder:
        document = yaml.safe_load(files["paddle_args.yaml"]) | {
            "output_dir": folder,
            "warmup_steps": 1,
            "local_rank": 0,
        }
        model, _, _, _, trained = get_train_args(document)
    pp, vpp = trained.pipeline_model_parallel_size, trained.virtual_pipeline_model_parallel_size
    asked = given["strategy"].hybrid_configs if trained.use_hybrid_parallel else {}
    found = {
        "tp": max(trained.tensor_model_parallel_size, 1),
        "pp": max(pp, 1),
        "vpp": vpp,
        "sep": max(trained.sep_parallel_size, 1),
        "sequences": trained.sequence_parallel,
        "sharding": [str(each.value) for each in trained.sharding],
        "replicas": [trained.data_parallel_size, max(trained.sharding_parallel_size, 1)],
        "batch": trained.train_batch_size * trained.gradient_accumulation_steps * trained.dataset_world_size,
        "again": [trained.recompute_granularity, trained.recompute_method, trained.recompute_num_layers],
        "fleet": [asked.get(f"{key}_degree", 1) for key in ("dp", "mp", "pp", "sharding", "sep", "ep")],
        "outside": trained.hybrid_parallel_topo_order,
    }
    if model.pp_seg_method.startswith("["):
        entries = [None] * 2 + [None] * 24 + [None]  # embedding, layers, norm, head
        found["cuts"] = SegmentLayers(entries, pp, ast.literal_eval(model.pp_seg_method)).do_segment()
    return found


for line in sys.stdin:
    question = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            answer = ask(question["files"], question["world_size"])
        except (Exception, SystemExit) as failure:
            answer = {"refused": f"{type(failure).__name__}: {failure}"}
    print(json.dumps(answer), flush=True)
