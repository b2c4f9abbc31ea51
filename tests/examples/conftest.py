"""The training example as tests see it: its folder importable, a model small enough for a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPT_FOLDER = Path(__file__).parents[2] / "examples" / "qwen2vl"

SMALL = (
    "--num-layers 5 --vision-num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --vocab-size 512 --seq-length 32 "
    "--image-size 56 --global-batch-size 4 --lr 3e-3"
)


@pytest.fixture(scope="session", autouse=True)
def script_folder() -> Path:
    """The folder of the script, put where its files find each other."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("skimage")
    sys.path.insert(0, str(SCRIPT_FOLDER))
    return SCRIPT_FOLDER


@pytest.fixture(scope="session")
def small_flags() -> str:
    return SMALL
