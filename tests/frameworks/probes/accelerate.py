"""What Hugging Face accelerate makes of a configuration: run by its own environment (held_against.py)."""

import json
import sys
import tempfile
from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env


def ask(text):
    """The environment that a training would start with."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text)
        config = load_config_from_file(str(path))
        arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        arguments, _, _ = _validate_launch_command(arguments)
        environment = prepare_multi_gpu_env(arguments)
    sections = ("FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
    found = {key: value for key, value in environment.items() if key.startswith(sections)}
    found |= {"processes": config.num_processes, "machines": config.num_machines}
    if arguments.use_parallelism_config:
        sizes = {
            name: int(environment[f"PARALLELISM_CONFIG_{name.upper()}"])
            for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
        }
        if ParallelismConfig(**sizes).total_size != config.num_processes:
            raise ValueError("the sizes do not multiply to num_processes")
    return found


for line in sys.stdin:
    question = json.loads(line)
    try:
        answer = ask(question["files"]["accelerate.yaml"])
    except (Exception, SystemExit) as failure:
        answer = {"refused": f"{type(failure).__name__}: {failure}"}
    print(json.dumps(answer), flush=True)
