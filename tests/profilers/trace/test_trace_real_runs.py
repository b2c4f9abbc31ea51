"""What a trace says is kept and passes by is what real runs on this machine keep, recomputed too, at TP 1 and 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tracing_jobs import DOCUMENTS, SMALL, WHOLE_DOCUMENTS, job_of, trace_job  # noqa: E402

from mm_autoparallel.model.blocks.expand import expand  # noqa: E402
from mm_autoparallel.model.job.job import Job  # noqa: E402
from mm_autoparallel.model.profiles.traced import TracedEntry  # noqa: E402
from mm_autoparallel.profilers.ends import Ends  # noqa: E402
from mm_autoparallel.profilers.huggingface import make_subject  # noqa: E402
from mm_autoparallel.profilers.kinds import find_kinds, live_layout  # noqa: E402
from mm_autoparallel.profilers.layout import find_layout, layers_of  # noqa: E402
from mm_autoparallel.profilers.meter import AllocationTrace, KeptActivations, count_bytes  # noqa: E402
from mm_autoparallel.profilers.observe import observe  # noqa: E402
from mm_autoparallel.profilers.shard import fake_mesh  # noqa: E402
from mm_autoparallel.profilers.split import find_split  # noqa: E402
from mm_autoparallel.profilers.stack import LayerStack  # noqa: E402
from mm_autoparallel.profilers.subject import Build, Subject  # noqa: E402

CPU = torch.device("cpu")


@contextlib.contextmanager
def real_model(document: dict[str, Any], job: Job, tp: int = 1) -> Iterator[tuple[Any, Subject]]:
    """The whole model on this machine's CPU, as the first of `tp` ranks holds it."""
    subject = make_subject(document, job.model, job.workload, Path("config.json"))
    depth = {modality.name: modality.layers.num_layers for modality in job.model.modalities}
    with fake_mesh(tp, "cpu") if tp > 1 else contextlib.nullcontext() as mesh:
        yield subject.build_model(Build(depth, CPU, mesh, job.workload.sequence_parallel)), subject


def traced_kept_bytes(entries: dict[str, TracedEntry], job: Job) -> int:
    return sum(entries[block.kind].activation_bytes * block.count for block in expand(job.model).blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "weight_bytes"),
    [
        pytest.param(1, False, 2.0, id="whole bf16", marks=pytest.mark.nightly),
        pytest.param(2, False, 4.0, id="divided fp32"),
        pytest.param(2, True, 2.0, id="sequences divided bf16", marks=pytest.mark.nightly),
    ],
)
def test_whole_models_keep_what_their_blocks_were_traced_to_keep(
    tp: int, sequence_parallel: bool, weight_bytes: float
) -> None:
    """Recomputed layers by the allocator, because what a checkpoint takes along in a closure is no saved tensor."""
    job = job_of(SMALL, 160, weight_bytes=weight_bytes, sequence_parallel=sequence_parallel)
    with real_model(SMALL, job, tp) as (live, subject):
        kept = KeptActivations(live)
        with kept:
            loss = subject.forward_step(live, 2, job.workload)
        real_bytes = kept.kept_bytes
        del loss
        alive_bytes = []
        for recompute in (False, True):
            if recompute:
                enable = getattr(live, "activation_checkpointing_enable", None) or live.gradient_checkpointing_enable
                enable({"use_reentrant": False})
            with AllocationTrace(CPU) as trace:
                trace.mark("forward")
                loss = subject.forward_step(live, 2, job.workload)
            alive_bytes.append(trace.segments["forward"].end_bytes)
            del loss
    entries = trace_job(SMALL, job, tp, 2)
    assert traced_kept_bytes(entries, job) == pytest.approx(real_bytes, rel=0.01)
    blocks = expand(job.model).blocks
    freed_bytes = sum(
        (entries[block.kind].activation_bytes - entries[block.kind].checkpoint_bytes) * block.count
        for block in blocks
        if block.role == "layer"
    )
    assert freed_bytes == pytest.approx(alive_bytes[0] - alive_bytes[1], rel=0.01)


BY_DAY = ("qwen2_5_vl", "llama", "qwen3_moe")
"""Families that run by day, one of each kind; the others by night."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        *(
            pytest.param(name, "flash", marks=() if name in BY_DAY else pytest.mark.nightly)
            for name in DOCUMENTS | WHOLE_DOCUMENTS
            if not name.startswith("deepseek")
        ),
        ("deepseek_v3", "unfused"),
        *(pytest.param(name, "unfused", marks=pytest.mark.nightly) for name in ("qwen2_vl", "deepseek_v2")),
    ],
)
def test_every_family_is_traced_as_it_runs(model_type: str, attention: str) -> None:
    """CPU has no fused attention for values of another size than queries (DeepSeek), which accelerators have."""
    document = (DOCUMENTS | WHOLE_DOCUMENTS)[model_type]
    weight_bytes = 2.0 if "experts" in " ".join(document) else 4.0  # PyTorch knows grouped products in bf16 alone
    job = job_of(document, 64, attention=attention, weight_bytes=weight_bytes)
    with real_model(document, job) as (live, subject):
        kept = KeptActivations(live)
        with kept:
            loss = subject.forward_step(live, 1, job.workload)
        real_bytes = kept.kept_bytes
        loss.backward()
        gradient_bytes = count_bytes([each.grad for each in live.parameters() if each.grad is not None])
    entries = trace_job(document, job, recompute=False)
    assert traced_kept_bytes(entries, job) == pytest.approx(real_bytes, rel=0.01)
    traced_gradient_bytes = sum(entries[block.kind].gradient_bytes * block.count for block in expand(job.model).blocks)
    assert traced_gradient_bytes == gradient_bytes


@pytest.mark.slow
def test_working_sets_are_those_of_the_allocator() -> None:
    """Of layers and ends, where they are largest; not of the stem, whose convolution has a buffer of its own on CPU."""
    job = job_of(SMALL, 160, weight_bytes=4.0)
    kinds = find_kinds(job, 3)
    subject = make_subject(SMALL, job.model, job.workload, Path("config.json"))
    live = subject.build_model(Build(kinds.depth, CPU))
    layout = live_layout(kinds, find_layout(live))

    def step() -> torch.Tensor:
        return subject.forward_step(live, 1, job.workload)

    split = find_split(live, layout, step)
    seen = observe(live, layout, split, step, CPU)
    entries = trace_job(SMALL, job, recompute=False)
    for modality, layers in layers_of(live, layout).items():
        stack = LayerStack(layers[1:2], seen.calls[f"{modality}_layer_1"], CPU)
        stack.backward(*stack.forward(1))  # gradients that are there
        with AllocationTrace(CPU) as trace:
            trace.mark("forward")
            leaf, output = stack.forward(1)
            trace.mark("backward")
            stack.backward(leaf, output)
        real_bytes = max(segment.passing_bytes for segment in trace.segments.values())
        assert entries[f"{modality}_layer"].transient_bytes == real_bytes, modality
    ends = Ends(live, layout, split, step, CPU)
    ends.trace_passing_bytes()
    passing_bytes = ends.trace_passing_bytes()
    for name in ("vision_post", "text_pre", "text_post"):
        assert entries[name].transient_bytes == passing_bytes[name], name
