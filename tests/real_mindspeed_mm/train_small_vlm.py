"""A checkout's own pretrain_vlm.py on a CPU: with stand-ins for the device, samples made here, equal first weights.

MINDSPEED_MM_CHECKOUT names the checkout; it, MindSpeed and Megatron-LM are found through PYTHONPATH. Weights depend on
a parameter's name and its layer's number in the whole model alone, and samples on their number alone, so a run gives
the same losses however it is divided.
"""

from __future__ import annotations

import os
import runpy
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import npu_stand_ins
import small_vlm
import torch
from torch import Tensor, nn

LAYERS = {"image_encoder.encoder.blocks.layers.": "vision", "text_decoder.decoder.layers.": "text"}


def main() -> None:
    """Train as the command line says."""
    npu_stand_ins.install(wide="REAL_MM_WIDE" in os.environ)
    checkout = Path(os.environ["MINDSPEED_MM_CHECKOUT"])
    __import__("mindspeed.megatron_adaptor")
    from megatron.core.datasets import utils
    from mindspeed_mm import data
    from mindspeed_mm.models import vlm_model

    utils.compile_helpers = lambda: None  # of text datasets; it would compile into the checkout
    data.build_mm_dataset = lambda *_, **__: None
    data.build_mm_dataloader = lambda *_, **__: Samples()
    build = vlm_model.VLMModel.__init__

    def build_and_fill(model: nn.Module, config: Any) -> None:
        build(model, config)
        fill(model, layers_before(config))

    vlm_model.VLMModel.__init__ = build_and_fill
    sys.path.insert(0, str(checkout))
    runpy.run_path(str(checkout / "pretrain_vlm.py"), run_name="__main__")


class Samples:
    """Batches of this rank: of each global batch, the micro-batches of its place among the data parallel ranks."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        from megatron.core import parallel_state
        from megatron.training import get_args

        size = get_args().micro_batch_size
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        first = 0
        while True:
            start = first + rank * size
            yield make_batch(range(start, start + size))
            first += ranks * size


def make_batch(numbers: range) -> dict[str, Tensor]:
    """The samples of these numbers. Each has one image, then text; equally many labels in all."""
    grid, length = small_vlm.GRID, small_vlm.SEQ_LENGTH
    ids, pixels = [], []
    features = small_vlm.CHANNELS * small_vlm.FRAMES * small_vlm.PATCH**2
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        text = torch.randint(1, 500, (length,), generator=generator)
        text[1] = small_vlm.IMAGE_START
        text[2 : 2 + small_vlm.IMAGE_TOKENS] = small_vlm.IMAGE_TOKEN
        ids.append(text)
        pixels.append(torch.randn(grid[0] * grid[1] * grid[2], features, generator=generator))
    tokens = torch.stack(ids)
    labels = tokens.clone()
    labels[:, : 2 + small_vlm.IMAGE_TOKENS] = -100
    return {
        "input_ids": tokens,
        "labels": labels,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor([grid] * len(tokens)),
    }


def layers_before(config: Any) -> dict[str, int]:
    """How many layers of each modality lie before the chunk of this rank that is being built."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    before = {}
    for modality, part in (("vision", config.image_encoder.vision_encoder), ("text", config.text_decoder)):
        counts = part.pipeline_num_layers
        rows = counts if isinstance(counts[0], (list, tuple)) else [counts]
        before[modality] = sum(map(sum, rows[:chunk])) + sum(rows[chunk][:stage])
    return before


@torch.no_grad()
def fill(model: nn.Module, before: dict[str, int]) -> None:
    """Give every parameter its first value: of the whole model's, this rank's part."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = _global_name(f"{path}.{name}", before)
            gated = path.endswith("linear_fc1") and bool(getattr(module.config, "gated_linear_unit", False))
            parameter.copy_(_shard(full_name, parameter, gated))


def _global_name(name: str, before: dict[str, int]) -> str:
    """`name` with its layer's number in the whole model."""
    for prefix, modality in LAYERS.items():
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            return f"{prefix}{int(number) + before[modality]}.{rest}"
    return name


def _shard(name: str, parameter: Tensor, gated: bool) -> Tensor:
    """This tensor parallel rank's part of the parameter `name` of the whole model.

    A gated layer's output is gate and up, each of which is divided by itself.
    """
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] *= ranks
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator) * 0.05
    if "norm" in name and name.endswith("weight"):
        whole += 1
    if dim is None:
        return whole
    if gated:
        assert dim == 0
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    return whole.chunk(ranks, dim=dim)[rank]


if __name__ == "__main__":
    main()
