"""Tokens of one sample through each part of a modality."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.model.blocks.tokens import TokenCounts, count_tokens
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.model_file import read_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models"
OMNI = read_model(FIXTURES / "qwen2.5omni_7b.json")
INTERNVL = read_model(FIXTURES / "internvl2_8b.json")


@pytest.mark.parametrize(
    ("name", "tokens", "images", "expected", "span"),
    [
        # one 1792 x 1792 image: 128 x 128 patches, four of which make one token
        ("qwen2vl_7b", 4096, 1, TokenCounts(16384, 16384, 4096, 1), 16384),
        ("qwen2vl_7b", 4096, 4, TokenCounts(16384, 16384, 4096, 4), 4096),
        # a tile of 448 x 448: 1024 patches and a class token in, 256 tokens out
        ("internvl2_8b", 256, 1, TokenCounts(1024, 1025, 256, 1), 1025),
        ("internvl2_8b", 3328, 13, TokenCounts(13312, 13325, 3328, 13), 1025),
        ("internvl2_8b", 0, 1, TokenCounts(0, 0, 0, 1), 0),
    ],
)
def test_images(name: str, tokens: int, images: int, expected: TokenCounts, span: int) -> None:
    workload = Workload(global_batch_size=1, seq_length=8192, image_tokens_per_sample=tokens, images_per_sample=images)
    counts = count_tokens(read_model(FIXTURES / f"{name}.json").encoders[0], workload)
    assert counts == expected
    assert counts.span_tokens == span


def test_half_a_minute_of_speech() -> None:
    """100 mel frames a second become 50 encoder tokens and 25 text tokens (Qwen2.5-Omni technical report)."""
    workload = Workload(global_batch_size=1, seq_length=8192, audio_tokens_per_sample=750)
    assert count_tokens(OMNI.encoders[1], workload) == TokenCounts(3000, 1500, 750, 1)


def test_text_is_the_whole_sequence() -> None:
    workload = Workload(global_batch_size=1, seq_length=8192, image_tokens_per_sample=100, images_per_sample=3)
    assert count_tokens(OMNI.text, workload) == TokenCounts(8192, 8192, 8192, 1)


def test_llava_drops_its_class_token() -> None:
    vision = read_model(FIXTURES.parent / "huggingface" / "llava_1_5_7b.json").encoders[0]
    workload = Workload(global_batch_size=1, seq_length=2048, image_tokens_per_sample=576)
    assert count_tokens(vision, workload) == TokenCounts(576, 577, 576, 1)


@given(tokens=st.integers(1, 4096), images=st.integers(1, 32))
def test_spans_hold_all_tokens_and_none_to_spare(tokens: int, images: int) -> None:
    workload = Workload(
        global_batch_size=1, seq_length=4096, image_tokens_per_sample=tokens, images_per_sample=min(images, tokens)
    )
    counts = count_tokens(INTERNVL.encoders[0], workload)
    assert counts.span_tokens * counts.num_spans >= counts.layer_tokens > (counts.span_tokens - 1) * counts.num_spans
    assert counts.layer_tokens == 4 * tokens + counts.num_spans
