"""A job so small that brute force can look at every plan of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.layers import Layers
from mm_autoparallel.model.job.model import Decoder, Encoder, Model, Patches, Projector
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.planner.search.agenda import Agenda
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.scouting import meet_at_once
from mm_autoparallel.planner.search.space import list_space

MakeJob = Callable[..., Job]


@pytest.fixture(scope="session")
def make_job() -> MakeJob:
    """Two vision and `num_layers` text layers on 4 devices of one node; other keyword arguments limit the search.

    Plans are ranked by their steps alone unless failure_price says otherwise."""

    def make(
        memory_bytes: float = 9e9,
        bandwidth_scale: float = 1.0,
        num_layers: int = 4,
        num_nodes: int = 1,
        freeze_vision: bool = True,
        workload: dict[str, Any] | None = None,
        host_link_bytes_per_s: float = 25e9,
        **limits: Any,
    ) -> Job:
        device = DEVICES["a100-80g"]

        def faster(link: Any) -> Any:
            return link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * bandwidth_scale})

        device = device.model_copy(
            update={
                "memory_bytes": int(memory_bytes),
                "context_bytes": 1_000_000_000,  # communicators included
                "communicator_bytes": 0,
                "node_link": faster(device.node_link),
                "network_link": faster(device.network_link),
                "host_link_bytes_per_s": host_link_bytes_per_s,
            }
        )
        projector = Projector(
            norm="layer", norm_size=1024, merge_tokens=4, layer_sizes=(4096, 4096, 2048), freeze=freeze_vision
        )
        vision = Encoder(
            name="vision",
            stem=Patches(in_features=1176),
            layers=Layers(num_layers=2, hidden_size=1024, ffn_size=4096, num_heads=16, norm="layer", gated=False),
            projector=projector,
            freeze=freeze_vision,
        )
        text = Layers(num_layers=num_layers, hidden_size=2048, ffn_size=5632, num_heads=16, num_kv_groups=8, norm="rms")
        figures = {"global_batch_size": 16, "seq_length": 4096, "image_tokens_per_sample": 1024}
        return Job(
            model=Model(name="two parts", encoders=(vision,), text=Decoder(vocab_size=32000, layers=text)),
            cluster=Cluster(num_nodes=num_nodes, devices_per_node=4, device=device),
            workload=Workload(**(figures | (workload or {}))),
            profiles=(),
            search=SearchSpace(**({"failure_price": 0.0} | limits)),
            path=Path("job.yaml"),
            sha256="0" * 64,
        )

    return make


@pytest.fixture(scope="module")
def no_clock() -> Iterator[None]:
    """No search of the module is ended by the clock, so that it does not matter how busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("slices.FIRST_SLICE_S", "planner.EXACT_S"):
            patch.setattr(f"mm_autoparallel.planner.search.{name}", 1e3)
        yield


@pytest.fixture
def spread_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes from the first answer on, and no end by the clock."""
    limits = {"slices.PROCESSES_WORTH_S": -1.0, "slices.FIRST_SLICE_S": 1e3, "planner.EXACT_S": 1e3}
    for name, value_s in limits.items():
        monkeypatch.setattr(f"mm_autoparallel.planner.search.{name}", value_s)


@pytest.fixture(scope="session")
def hard_problem() -> Problem:
    """Many kinds on many stages and chunks: its optimum takes far longer to prove than any test waits."""
    kinds = tuple(ChainBlock(f"k{i}", "text", 5, 1.0 + i / 7, 2.0 + i / 5) for i in range(20))
    return Problem(
        num_stages=8,
        num_chunks=3,
        num_microbatches=24,
        schedule="interleaved_1f1b",
        chain=kinds,
        memory_limit_bytes=(1.0,) * 8,
        stage_static_bytes=(0.0,) * 8,
        stage_tail_ms=(0.0,) * 8,
        p2p_ms=(0.01,) * 23,
        p2p_ms_per_byte=(0.0,) * 23,
    )


@pytest.fixture
def agenda_and_met() -> Callable[[Job], tuple[Agenda, list[Pipeline]]]:
    """Of a job: an agenda with all its strategies, and those whose plans it meets at once, in their order."""

    def make(job: Job) -> tuple[Agenda, list[Pipeline]]:
        met: list[Pipeline] = []

        def scout(pipelines: Iterator[Pipeline]) -> None:
            for pipeline in pipelines:
                meet_at_once(pipeline)
                met.append(pipeline)

        agenda = Agenda(CostModel(job), scout=scout)
        for entry in list_space(job):
            agenda.admit(entry, lambda: False)
        return agenda, met

    return make
