"""Stand-in: builds the chunks of this rank as a training would, and writes down what they are."""

import json
import os
import sys
from pathlib import Path

from megatron.core import parallel_state
from megatron.training import get_args
from megatron.training.initialize import initialize_megatron

from mindspeed_mm.arguments import extra_args_provider_decorator
from mindspeed_mm.configs.config import merge_mm_args

COMMAND_LINE_AT_IMPORT = list(sys.argv)


def pretrain(
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
    extra_args_provider=None,
    args_defaults=None,
):
    if "--auto-parallel-mm" in sys.argv:
        raise RuntimeError("this is where MindSpeed's own search would begin")
    initialize_megatron(extra_args_provider_decorator(extra_args_provider), args_defaults)
    arguments = get_args()
    merge_mm_args(arguments)
    chunks = arguments.virtual_pipeline_model_parallel_size
    record = {"sizes": vars(arguments) | {"mm": None}, "at_import": COMMAND_LINE_AT_IMPORT, "chunks": []}
    for chunk in range(chunks):
        if chunks > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        model = model_provider(pre_process=True, post_process=True)
        record["chunks"].append(model.built)
    rank = os.environ.get("RANK", "0")
    Path(f"trained-{rank}.json").write_text(json.dumps(record, default=str))
