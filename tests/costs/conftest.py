"""A small job of every kind of part, to be changed by the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.layers import Layers
from mm_autoparallel.model.job.model import Decoder, Encoder, MelFrames, Model, Patches, Projector
from mm_autoparallel.model.job.workload import Workload

TEXT = Layers(num_layers=8, hidden_size=2048, ffn_size=5632, num_heads=16, num_kv_groups=8, norm="rms")
VISION = Layers(num_layers=4, hidden_size=1024, ffn_size=4096, num_heads=16, norm="layer", gated=False)
AUDIO = Layers(num_layers=2, hidden_size=1024, ffn_size=4096, num_heads=16, norm="layer", gated=False)


def projector(inputs: int, freeze: bool) -> Projector:
    return Projector(
        norm="layer", norm_size=1024, merge_tokens=inputs // 1024, layer_sizes=(inputs, 4096, 2048), freeze=freeze
    )


MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Vision, audio and text on 4 × 8 devices; keyword arguments change the workload, or the parts they name."""

    def make(
        freeze_vision: bool = True,
        freeze_audio: bool = True,
        freeze_text: bool = False,
        tied: bool = False,
        cluster: Cluster | None = None,
        profiles: tuple[Path, ...] = (),
        **workload: Any,
    ) -> Job:
        vision = Encoder(
            name="vision",
            stem=Patches(in_features=1176),
            layers=VISION,
            projector=projector(4096, freeze_vision),
            freeze=freeze_vision,
        )
        audio = Encoder(
            name="audio",
            stem=MelFrames(num_mel_bins=128),
            layers=AUDIO,
            projector=projector(1024, freeze_audio),
            freeze=freeze_audio,
        )
        text = Decoder(vocab_size=32000, layers=TEXT, tied=tied, freeze=freeze_text)
        figures = {
            "global_batch_size": 64,
            "seq_length": 4096,
            "image_tokens_per_sample": 1024,
            "audio_tokens_per_sample": 512,
        }
        return Job(
            model=Model(name="three parts", encoders=(vision, audio), text=text),
            cluster=cluster or Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["a100-80g"]),
            workload=Workload(**(figures | workload)),
            profiles=profiles,
            search=SearchSpace(),
            path=tmp_path / "job.yaml",
            sha256="",
        )

    return make
