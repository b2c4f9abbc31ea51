"""What torchtitan makes of a configuration: run by its own environment (held_against.py), of 0.2, 0.3 or newer."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import sys
import tempfile

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

IS_TOML = os.environ.get("TOML") == "1"


def parse(files, folder):
    """The configuration that torchtitan's own manager makes of the files."""
    for name, text in files.items():
        pathlib.Path(folder, name).write_text(text)
    if IS_TOML:
        return ConfigManager().parse_args(["--job.config_file", str(pathlib.Path(folder, "plan.toml"))])
    sys.modules.pop("planned", None)
    importlib.invalidate_caches()
    return ConfigManager().parse_args(["--module", "planned", "--config", "planned"])


def read_batch(sizes, training):
    """Samples of a rank, of a step and of a micro-batch; of the newest code, which counts tokens, of a micro-batch and
    of a step, and micro-batches."""
    if not hasattr(training, "max_context_length"):
        return [training.local_batch_size, training.global_batch_size, sizes.pipeline_parallel_microbatch_size]
    tokens = training.num_tokens_per_microbatch_per_dp_rank, training.num_tokens_per_train_step
    return [*(count / training.max_context_length for count in tokens), sizes.num_pp_microbatches]


def ask(files, world_size):
    """Sizes, parts, schedule, batches and recompute, after ParallelDims has taken the sizes."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        try:
            config = parse(files, folder)
        finally:
            sys.path.remove(folder)
    sizes, training = config.parallelism, config.training
    found = {
        "copies": sizes.data_parallel_replicate_degree,
        "shards": sizes.data_parallel_shard_degree,
        "reshard": sizes.fsdp_reshard_after_forward,
        "tp": sizes.tensor_parallel_degree,
        "cp": sizes.context_parallel_degree,
        "ep": sizes.expert_parallel_degree,
        "pp": sizes.pipeline_parallel_degree,
        "parts": [[n for n in part if n.startswith("layers.")] for part in sizes.module_fqns_per_model_part or []],
        "schedule": sizes.pipeline_parallel_schedule,
        "batch": read_batch(sizes, training),
    }
    keys = {"dp_replicate": "copies", "dp_shard": "shards"} | {key: key for key in ("tp", "cp", "ep", "pp")}
    more = {"etp": sizes.expert_tensor_parallel_degree} if IS_TOML else {}
    ParallelDims(**{key: found[name] for key, name in keys.items()}, **more, world_size=world_size)
    again = config.activation_checkpoint
    found["again"] = again.mode if IS_TOML else again.layers if again else []
    if not IS_TOML:
        found["sequences"] = sizes.enable_sequence_parallel
    return found


for line in sys.stdin:
    question = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            answer = ask(question["files"], question["world_size"])
        except (Exception, SystemExit) as failure:
            answer = {"refused": f"{type(failure).__name__}: {failure}"}
    print(json.dumps(answer), flush=True)
