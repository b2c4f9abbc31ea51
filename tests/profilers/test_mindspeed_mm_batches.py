"""Samples and optimizer for MindSpeed-MM models: exactly the tokens that were asked for, and Megatron's precision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.mindspeed_mm.batch import make_batch
from mm_autoparallel.profilers.mindspeed_mm.subject import _CopiedAdamW

IMAGE, START = 50, 51


def config(**vision: Any) -> SimpleNamespace:
    encoder = {"patch_size": 14, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2} | vision
    return SimpleNamespace(
        img_context_token_id=IMAGE,
        vision_start_token_id=START,
        image_encoder=SimpleNamespace(vision_encoder=SimpleNamespace(**encoder)),
        text_decoder=SimpleNamespace(vocab_size=64),
    )


def workload(tokens: int, images: int = 1, length: int = 32, audio: int = 0) -> Workload:
    return Workload(
        global_batch_size=1,
        seq_length=length,
        image_tokens_per_sample=tokens,
        images_per_sample=images,
        audio_tokens_per_sample=audio,
    )


@pytest.mark.parametrize(("tokens", "images", "grids"), [(12, 1, [[1, 6, 8]]), (13, 2, [[1, 2, 14], [1, 4, 6]])])
def test_images_of_any_size(tokens: int, images: int, grids: list[list[int]]) -> None:
    batch = make_batch(config(), 3, workload(tokens, images), torch.bfloat16)
    assert batch["image_grid_thw"].tolist() == grids * 3
    assert batch["pixel_values"].shape == (3 * tokens * 4, 3 * 2 * 14 * 14)
    assert batch["pixel_values"].dtype == torch.bfloat16
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape == batch["attention_mask"].shape == (3, 32)
    assert (ids == IMAGE).sum(dim=1).tolist() == [tokens] * 3
    assert (ids == START).sum(dim=1).tolist() == [images] * 3
    assert ids[:, 0].tolist() == [START] * 3
    assert (labels == -100).sum(dim=1).tolist() == [tokens] * 3


def test_a_sample_that_is_all_image_has_no_room_for_marks() -> None:
    batch = make_batch(config(), 1, workload(32), torch.float32)
    assert (batch["input_ids"] == IMAGE).all()


def test_text_alone() -> None:
    batch = make_batch(config(), 2, workload(0), torch.float32)
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert not ((batch["input_ids"] == IMAGE) | (batch["input_ids"] == START)).any()


def test_tiles() -> None:
    tiled = config(image_size=[56, 56], downsample_ratio=0.5)
    batch = make_batch(tiled, 2, workload(8, 2), torch.float32)
    assert batch["pixel_values"].shape == (4, 3, 56, 56)
    assert batch["image_flags"].tolist() == [[1]] * 4
    with pytest.raises(ProfileError, match="an image is 9 tokens of the workload, and a tile of this model is 4"):
        make_batch(tiled, 2, workload(9), torch.float32)


def test_audio_is_refused() -> None:
    with pytest.raises(ProfileError, match="samples with audio cannot be made"):
        make_batch(config(), 1, workload(4, audio=4), torch.float32)


def test_half_precision_is_stepped_in_full() -> None:
    """Many steps too small for bf16 alone: the copies move, and the parameters follow them, rounded."""
    torch.manual_seed(0)
    own = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.ones(8))
    ours, reference = _CopiedAdamW([own]), torch.optim.AdamW([full], lr=1e-5)
    for _ in range(600):
        own.grad = torch.ones_like(own)
        full.grad = torch.ones_like(full)
        ours.step()
        reference.step()
    assert torch.equal(own, full.bfloat16())
    assert not torch.equal(own, torch.ones_like(own))
    ours.zero_grad()
    assert own.grad is None
