"""The calls into Megatron and MindSpeed-MM themselves, in one place: nothing here runs without their packages.

They are found by name when they are called, so that everything else works and is tested where they are not installed.
Names are those of MindSpeed-MM 2.0 to 2.3 with Megatron core 0.8 and 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


def running_arguments() -> Any:
    """The arguments that Megatron runs with (`get_args()`)."""
    return import_module("megatron.training").get_args()


def stage_and_chunk() -> tuple[int, int]:
    """The pipeline stage of this process, and the chunk of it that is being built."""
    state = import_module("megatron.core.parallel_state")
    return state.get_pipeline_model_parallel_rank(), state.get_virtual_pipeline_model_parallel_rank() or 0


def start(extra_arguments: Callable[[Any], Any] | None, defaults: Mapping[str, Any] | None) -> Any:
    """Read and check the command line as MindSpeed-MM does before it trains, without its process groups.

    Gives the arguments, with the model's configuration in them. What `training.pretrain` does in this order.
    """
    provider = import_module("mindspeed_mm.arguments").extra_args_provider_decorator(extra_arguments)
    import_module("megatron.training.initialize").initialize_megatron(
        extra_args_provider=provider, args_defaults=dict(defaults or {}), skip_mpu_initialization=True
    )
    arguments = running_arguments()
    import_module("mindspeed_mm.configs.config").merge_mm_args(arguments)
    if not hasattr(arguments, "dist_train"):
        arguments.dist_train = False
    import_module("mindspeed_mm.patchs.patch_manager").PatchesManager.apply_patches_from_config()
    return arguments


def divide(arguments: Any, tp: int) -> None:
    """Make tensor parallel groups of `tp` ranks of the default process group; above 1 with sequence parallel."""
    state = import_module("megatron.core.parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    with _groups_of_one_backend():
        state.initialize_model_parallel(tensor_model_parallel_size=tp)
    arguments.tensor_model_parallel_size = tp
    arguments.sequence_parallel = tp > 1
    arguments.world_size, arguments.rank = dist.get_world_size(), dist.get_rank()
    arguments.data_parallel_size = dist.get_world_size() // tp
    import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(arguments.seed)


def mark_parameters(model: torch.nn.Module) -> None:
    """Give parameters that no parallel layer marked Megatron's default marks, which its gradients' norm reads."""
    mark = import_module("megatron.core.tensor_parallel").set_defaults_if_not_set_tensor_model_parallel_attributes
    for parameter in model.parameters():
        mark(parameter)


@contextmanager
def _groups_of_one_backend() -> Iterator[None]:
    """Megatron makes gloo groups beside its own, for checkpoints; ranks that are not there never join those."""
    make = dist.new_group

    def make_plain(*args: Any, **options: Any) -> Any:
        if options.get("backend") == "gloo" and dist.get_backend() == "fake":
            options["backend"] = None
        return make(*args, **options)

    dist.new_group = make_plain
    try:
        yield
    finally:
        dist.new_group = make
