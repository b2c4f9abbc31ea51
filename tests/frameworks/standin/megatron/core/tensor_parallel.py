"""Stand-in: seeds, and marks on parameters."""

import torch


def model_parallel_cuda_manual_seed(seed):
    torch.manual_seed(seed)


def set_defaults_if_not_set_tensor_model_parallel_attributes(parameter):
    if not hasattr(parameter, "tensor_model_parallel"):
        parameter.tensor_model_parallel = False
