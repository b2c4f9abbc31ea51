"""Stand-in: groups of ranks, tensor parallel ranks next to each other."""

import torch.distributed as dist

_state = {}


def model_parallel_is_initialized():
    return bool(_state)


def destroy_model_parallel():
    _state.clear()


def initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1):
    world, rank = dist.get_world_size(), dist.get_rank()
    assert not _state
    assert world % (tensor_model_parallel_size * pipeline_model_parallel_size) == 0
    dist.new_group(list(range(world)), backend="gloo")
    _state["tensor"] = tensor_model_parallel_size
    _state["stage"] = rank * pipeline_model_parallel_size // world
    _state["chunk"] = None


def set_virtual_pipeline_model_parallel_rank(chunk):
    _state["chunk"] = chunk


def get_virtual_pipeline_model_parallel_rank():
    return _state["chunk"]


def get_pipeline_model_parallel_rank():
    return _state["stage"]
