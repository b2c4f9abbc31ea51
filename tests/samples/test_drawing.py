"""Samples drawn from named distributions have their means and spreads, and the same seed draws the same."""

from __future__ import annotations

import numpy as np
import pytest

from mm_autoparallel.samples.draw import constant, draw_table, lognormal, mixture
from mm_autoparallel.samples.statistics import describe_table

QUANTITIES = {
    "images": lognormal(2.1, 0.8),
    "patches": mixture((1024.0, 2304.0, 4096.0), (5.0, 3.0, 2.0)),
    "audios": constant(0.5),
    "audio_seconds": constant(12.5),
    "text_tokens": lognormal(700.0, 1.0, most=8000.0),
}


def test_means_and_spreads_are_those_that_were_asked_for() -> None:
    table = draw_table(QUANTITIES, seed=1)
    assert table.num_images.mean() == pytest.approx(2.1, rel=0.02)
    assert table.patches.mean() == pytest.approx(0.5 * 1024 + 0.3 * 2304 + 0.2 * 4096, rel=0.02)
    assert {*table.patches.tolist()} == {1024, 2304, 4096}
    assert table.num_recordings.mean() == pytest.approx(0.5, rel=0.05)
    assert {*table.num_recordings.tolist()} == {0, 1}
    assert table.text_tokens.max() <= 8000
    assert table.text_tokens.mean() == pytest.approx(700, rel=0.03)
    plain = lognormal(700.0, 1.0)(np.random.default_rng(0), 400_000)
    assert (plain.mean(), plain.std() / plain.mean()) == (pytest.approx(700, rel=0.01), pytest.approx(1.0, rel=0.03))


def test_a_seed_decides_every_draw() -> None:
    assert draw_table(QUANTITIES, seed=1).sha256 == draw_table(QUANTITIES, seed=1).sha256
    assert draw_table(QUANTITIES, seed=1).sha256 != draw_table(QUANTITIES, seed=2).sha256


def test_frames_that_a_patch_joins_are_images_of_their_sample() -> None:
    videos = {"videos": constant(2.0), "frames": constant(7.0), "frame_patches": constant(256.0)}
    table = draw_table(QUANTITIES | videos, seed=1)
    plain = draw_table(QUANTITIES, seed=1)
    assert (table.num_images - plain.num_images == 2 * 4).all()
    for sample in (0, 1, len(table) - 1):
        assert table.sample(sample).patches == plain.sample(sample).patches + 8 * (256,)
    assert (draw_table(videos, seed=1, frames_per_patch=1).num_images == 2 * 7).all()


def test_more_frames_than_memory_holds_are_refused() -> None:
    videos = {"videos": constant(1.0), "frames": constant(1e9), "frame_patches": constant(4.0)}
    with pytest.raises(ValueError, match="the most"):
        draw_table(videos, seed=1)


def test_figures_of_a_table() -> None:
    rows = {row.of: row for row in describe_table(draw_table({"text_tokens": mixture((10.0, 30.0))}, 0))}
    assert list(rows) == ["tokens", "text_tokens"]
    assert rows["tokens"].spread_fraction == pytest.approx(0.5, rel=0.05)
    assert (rows["tokens"].p99_count, rows["tokens"].most_count) == (30, 30)
