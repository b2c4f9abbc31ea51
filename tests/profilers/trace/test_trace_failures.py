"""What cannot be traced is refused with the operator, the module and the way round; what can be, though odd, is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from tracing_jobs import DOCUMENTS, job_of, trace_job  # noqa: E402

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.model.job.job import Job  # noqa: E402
from mm_autoparallel.model.profiles.traced import TracedEntry  # noqa: E402
from mm_autoparallel.model.readers.job_file import parse_job  # noqa: E402
from mm_autoparallel.profilers.subject import Build, Subject  # noqa: E402
from mm_autoparallel.profilers.trace.fakes import on_fakes  # noqa: E402
from mm_autoparallel.profilers.trace.run import Configuration, trace_configuration  # noqa: E402

Oddity = Callable[[Tensor, Tensor], Tensor]
"""What a layer does with its state [samples, tokens, width] and the batch's token numbers."""

WIDTH = 16


class OddLayer(nn.Module):
    """A linear layer with a residual, and something odd before it."""

    def __init__(self, oddity: Oddity) -> None:
        super().__init__()
        self.oddity, self.linear = oddity, nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        return state + self.linear(self.oddity(state, tokens))


class OddModel(nn.Module):
    def __init__(self, num_layers: int, oddity: Oddity) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(OddLayer(oddity) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embedding(tokens)
        for layer in self.layers:
            state = layer(state, tokens)
        return nn.functional.cross_entropy(self.head(state).flatten(0, 1).float(), tokens.flatten())


def odd_job(weight_bytes: float = 2.0) -> Job:
    layers = {"num_layers": 4, "hidden_size": WIDTH, "ffn_size": WIDTH, "num_heads": 1, "norm": "rms"}
    return parse_job(
        {
            "model": {"text": {"vocab_size": 32, "layers": layers}},
            "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "a100-80g"},
            "workload": {"global_batch_size": 2, "seq_length": 8, "weight_bytes": weight_bytes},
            "freeze": {"text": False},
        },
        Path("job.yaml"),
    )


def trace_odd(oddity: Oddity, job: Job | None = None, tp: int = 1) -> dict[str, TracedEntry]:
    def build_model(build: Build) -> nn.Module:
        return OddModel(build.depth["text"], oddity).to(build.device, torch.bfloat16)

    subject = Subject(
        build_model,
        lambda model, num, work: model(torch.arange(num * work.seq_length).view(num, -1)),
        torch.optim.AdamW,
    )
    job = job or odd_job()
    entries = trace_configuration(subject, job, Configuration(tp, 1, job.workload), recompute=True)
    return {entry.kind: entry for entry in entries}


def chosen_by_numbers(state: Tensor, _: Tensor) -> Tensor:
    return state * state[state.sum(dim=-1) > 0].sum()


def branch_by_numbers(state: Tensor, _: Tensor) -> Tensor:
    return state if state.sum() > 0 else -state


def count_in_numpy(state: Tensor, _: Tensor) -> Tensor:
    return state * float(state.detach().float().numpy().sum())


@pytest.mark.parametrize(
    ("oddity", "operator"),
    [
        (chosen_by_numbers, "aten.nonzero.default"),
        (branch_by_numbers, "aten._local_scalar_dense.default"),
        (count_in_numpy, "past PyTorch's operators"),
    ],
)
def test_what_needs_the_numbers_of_a_tensor_is_named(oddity: Oddity, operator: str) -> None:
    with pytest.raises(ProfileError) as told:
        trace_odd(oddity)
    message = str(told.value)
    assert operator in message
    assert "layers.0 (OddLayer)" in message
    assert f"{Path(__file__).name}:" in message  # and its line
    assert "or measure it on a device with `mm-autoparallel profile`" in message


def test_an_operator_without_known_shapes_is_named() -> None:
    @torch.library.custom_op("tracing_test::doubled", mutates_args=())
    def doubled(state: Tensor) -> Tensor:
        return 2 * state

    doubled.register_autograd(lambda _, gradient: 2 * gradient)
    with pytest.raises(ProfileError, match=r"layers\.0 \(OddLayer\) at .* runs .*tracing_test::doubled.*register_fake"):
        trace_odd(lambda state, _: doubled(state))
    doubled.register_fake(torch.empty_like)
    assert any(
        one.name == "tracing_test::doubled" for one in trace_odd(lambda x, _: doubled(x))["text_layer"].operators
    )


def test_a_mistake_of_the_model_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="Attempting to broadcast"):
        trace_odd(lambda state, _: state + state[..., :3])


def test_what_the_batch_decides_is_known() -> None:
    """Sizes and branches that follow from the batch's integers are no numbers that the model computes."""

    def chosen_by_batch(state: Tensor, tokens: Tensor) -> Tensor:
        assert int(tokens.max()) == 7
        return state + state[tokens % 2 == 0].sum()

    entry = trace_odd(chosen_by_batch)["text_layer"]
    assert any(one.shapes[0] == (4, WIDTH) for one in entry.operators if one.name == "sum")


def test_converted_models_keep_their_ties() -> None:
    """`model.to(dtype)` of fake parameters: the head's table stays the embedding's, and counts once."""
    entries = trace_odd(lambda state, _: state)
    assert entries["text_pre"].parameter_count == 32 * WIDTH
    assert entries["text_post"].parameter_count == 0
    assert entries["text_layer"].parameter_bytes == 2 * (WIDTH * WIDTH + WIDTH)


def test_another_precision_than_the_jobs_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"weight_bytes 4, and build_model made most weights with 2"):
        trace_odd(lambda state, _: state, odd_job(4.0))


def test_a_plan_without_divided_sequences_is_not_asked_for_them() -> None:
    with pytest.raises(ProfileError, match=r"sequence parallel at TP 2 .* `sequence_parallel: false`"):
        trace_odd(lambda state, _: state, tp=2)
    document = DOCUMENTS["llava"]
    with pytest.raises(ProfileError, match="does not divide sequences"):
        trace_job(document, job_of(document, sequence_parallel=True), tp=2)


def test_large_batches_and_masks_take_no_memory() -> None:
    with on_fakes(nn.Identity()):
        pixels, few = torch.randn(2**20 + 1), torch.randn(2**20)
        numbers = torch.zeros(2**20 + 1, dtype=torch.int64)
        row = torch.arange(2**14)
        mask, small_mask = row[None, :] <= row[:, None], row[None, :8] <= row[:, None]
    assert [isinstance(made, FakeTensor) for made in (pixels, few, numbers, mask, small_mask)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert (pixels.shape, pixels.dtype, mask.shape, mask.dtype) == (
        (2**20 + 1,),
        torch.float32,
        (2**14, 2**14),
        torch.bool,
    )
