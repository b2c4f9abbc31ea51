"""Checkpoint: weights as Hugging Face reads and writes them, one safetensors file for each virtual stage.

A folder that is written here loads with Qwen2VLForConditionalGeneration.from_pretrained, and a published checkpoint of
the model loads here, under any parallel sizes: names and shapes are those of the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen2VLConfig

from failures import TrainingError
from model import Held, Stage
from parallel import Ranks, separate_heads

INDEX = "model.safetensors.index.json"

_PREFIXES = {
    ("vision", "pre"): "model.visual.",
    ("vision", "layer"): "model.visual.blocks.{}.",
    ("vision", "post"): "model.visual.",
    ("text", "pre"): "model.language_model.",
    ("text", "layer"): "model.language_model.layers.{}.",
}


def whole_name(modality: str, role: str, index: int, path: str) -> str:
    """The name in the whole model of the parameter at `path` of a part."""
    if role == "post" and modality == "text":
        return path if path.startswith("lm_head") else f"model.language_model.{path}"
    return _PREFIXES[modality, role].format(index) + path


class Weights:
    """The tensors of a folder of safetensors files by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as content:
                # Published files write the vision tower as `visual.` and the decoder as `model.`.
                self._file_of.update((name, file) for name in content.keys())  # noqa: SIM118 (no mapping)
        self.folder = folder

    def __len__(self) -> int:
        return len(self._file_of)

    def fill(self, part: nn.Module, modality: str, role: str, index: int) -> None:
        """Copy the tensors of one part, whole. Raises TrainingError naming one that is missing or of another shape."""
        for path, parameter in part.named_parameters():
            name = whole_name(modality, role, index, path)
            older = name.removeprefix("model.").replace("language_model.", "model.", 1)
            known = name if name in self._file_of else older
            if known not in self._file_of:
                raise TrainingError(f"--load {self.folder} holds no tensor {name}; it is no checkpoint of this model")
            with safe_open(self._file_of[known], "pt") as content:
                values = content.get_tensor(known)
            if values.shape != parameter.shape:
                raise TrainingError(
                    f"--load {self.folder}: {known} has shape {tuple(values.shape)}, and the model that the flags "
                    f"describe has {tuple(parameter.shape)}"
                )
            parameter.data.copy_(values)


def save_checkpoint(
    folder: Path, stages: list[tuple[int, Stage, tuple[Held, ...], Ranks]], config: Qwen2VLConfig
) -> None:
    """Write the weights of all ranks' virtual stages (number, stage, what it holds, the ranks it is divided over).

    Every rank takes part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, stage, pieces, ranks in stages:
        writes = ranks.place("dp") == 0 and ranks.place("tp") == 0
        tensors = {}
        for name, parameter in _named_wholes(stage, pieces, ranks.size("tp")):
            if writes:
                tensors[name] = parameter.cpu().contiguous()
        if writes:
            save_file(tensors, folder / f"stage-{number:03d}.safetensors", metadata={"format": "pt"})
    dist.barrier()
    if dist.get_rank() == 0:
        names: dict[str, str] = {}
        for file in sorted(folder.glob("stage-*.safetensors")):
            with safe_open(file, "pt") as content:
                names.update(dict.fromkeys(content.keys(), file.name))
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=2), encoding="utf-8")
        config.save_pretrained(folder)


@torch.no_grad()
def _named_wholes(stage: Stage, pieces: tuple[Held, ...], num_tp_ranks: int) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each parameter of a stage, gathered from the ranks that hold slices."""
    for piece in pieces:
        tower = stage.vision if piece.modality == "vision" else stage.text
        parts = list(tower.layers) if piece.role == "layer" else [getattr(tower, piece.role)]
        begun = piece.first
        for index, part in enumerate(parts):
            for path, parameter in part.named_parameters():
                values = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                if ".qkv." in f".{path}":
                    values = separate_heads(values, num_tp_ranks)
                yield whole_name(piece.modality, piece.role, begun + index, path), values
