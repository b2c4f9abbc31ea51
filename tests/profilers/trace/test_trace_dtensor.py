"""A model of ones own that PyTorch's tensor parallelism divides (DTensor) is traced as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

from mm_autoparallel.model.profiles.traced import TracedEntry  # noqa: E402
from mm_autoparallel.model.readers.job_file import parse_job  # noqa: E402
from mm_autoparallel.profilers.subject import Build, Subject  # noqa: E402
from mm_autoparallel.profilers.trace.run import Configuration, trace_configuration  # noqa: E402

WIDTH, INNER, TOKENS = 16, 32, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, state: Tensor) -> Tensor:
        return state + self.down(torch.relu(self.up(state)))


class Perceptrons(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embedding(tokens)
        for layer in self.layers:
            state = layer(state)
        return nn.functional.cross_entropy(self.head(state).flatten(0, 1), tokens.flatten())


def build_model(build: Build) -> nn.Module:
    model = Perceptrons(build.depth["text"]).to(torch.bfloat16)
    if build.tp_mesh is not None:
        for layer in model.layers:
            parallelize_module(layer, build.tp_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def trace_perceptrons(tp: int) -> dict[str, TracedEntry]:
    layers = {"num_layers": 4, "hidden_size": WIDTH, "ffn_size": INNER, "num_heads": 2, "norm": "rms"}
    document = {
        "model": {"text": {"vocab_size": 32, "layers": layers}},
        "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "a100-80g"},
        "workload": {"global_batch_size": 2, "seq_length": TOKENS, "sequence_parallel": False},
        "freeze": {"text": False},
    }
    job = parse_job(document, Path("job.yaml"))
    subject = Subject(
        build_model,
        lambda model, num, work: model(torch.arange(num * work.seq_length).view(num, -1)),
        torch.optim.AdamW,
    )
    entries = trace_configuration(subject, job, Configuration(tp, 1, job.workload), recompute=True)
    return {entry.kind: entry for entry in entries}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_holds_and_runs_its_part(tp: int) -> None:
    entry = trace_perceptrons(tp)["text_layer"]
    assert entry.parameter_count == (2 * WIDTH * INNER + INNER) // tp + WIDTH
    assert entry.flops("forward", "matrix_product") == 2 * TOKENS * 2 * WIDTH * INNER // tp
    # the input, and the output of the ReLU, which is the second product's input as well
    assert entry.activation_bytes == 2 * TOKENS * (WIDTH + INNER // tp)
    assert entry.checkpoint_bytes == 2 * TOKENS * WIDTH


def test_its_collectives_are_seen() -> None:
    found = [
        (one.phase, one.name, one.num_calls, one.moved_bytes)
        for one in trace_perceptrons(2)["text_layer"].operators
        if one.kind == "collective"
    ]
    state_bytes = 2 * TOKENS * WIDTH
    assert found == [("forward", "all_reduce", 1, state_bytes), ("backward_input", "all_reduce", 1, state_bytes)]
