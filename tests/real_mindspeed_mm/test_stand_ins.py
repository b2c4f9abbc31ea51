"""The stand-ins that real MindSpeed-MM is run on, against torch's own operators; and how its runs are judged."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import compare_losses
import npu_operators
import pytest
import torch
import train_small_vlm
from compare_losses import Run
from torch.nn import functional

BATCH, LENGTH, HEADS, CHANNELS = 2, 5, 4, 6


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("layout", ["SBH", "BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(layout: str, groups: int, causal: bool, generator: torch.Generator) -> None:
    q, k, v = (draw(generator, BATCH, heads, LENGTH, CHANNELS) for heads in (HEADS, groups, groups))
    there = {
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
        "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "BSND": lambda x: x.transpose(1, 2),
        "BNSD": lambda x: x,
    }[layout]
    sparse_mode = npu_operators.LEFT_UP_CAUSAL if causal else 0
    scale = 1 / math.sqrt(CHANNELS)
    found = npu_operators.npu_fusion_attention(
        *map(there, (q, k, v)), HEADS, layout, scale=scale, sparse_mode=sparse_mode
    )[0]
    repeated = [x.repeat_interleave(HEADS // groups, dim=1) for x in (k, v)]
    torch.testing.assert_close(found, there(functional.scaled_dot_product_attention(q, *repeated, is_causal=causal)))


def test_attention_hides_what_the_mask_hides(generator: torch.Generator) -> None:
    q, k, v = (draw(generator, BATCH, HEADS, LENGTH, CHANNELS) for _ in range(3))
    mask = torch.rand((LENGTH, LENGTH), generator=generator) < 0.4
    mask.fill_diagonal_(False)
    found = npu_operators.npu_fusion_attention(q, k, v, HEADS, "BNSD", atten_mask=mask, scale=1 / math.sqrt(CHANNELS))
    torch.testing.assert_close(found[0], functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask))


def test_sequences_one_after_the_other_do_not_see_each_other(generator: torch.Generator) -> None:
    q, k, v = (draw(generator, 7, HEADS, CHANNELS) for _ in range(3))
    found = npu_operators.npu_fusion_attention(
        q, k, v, HEADS, "TND", scale=1 / math.sqrt(CHANNELS), actual_seq_qlen=[3, 7], actual_seq_kvlen=[3, 7]
    )[0]
    for span in (slice(0, 3), slice(3, 7)):
        heads_first = [x[span].transpose(0, 1) for x in (q, k, v)]
        torch.testing.assert_close(found[span], functional.scaled_dot_product_attention(*heads_first).transpose(0, 1))


@pytest.mark.parametrize("form", ["of core 0.8", "of core 0.12"])
def test_adam_is_torchs_from_its_first_step_on(form: str, generator: torch.Generator) -> None:
    """The step before the first has powers of 1: taken for the step's own they divide by zero."""
    weight = draw(generator, 6)
    ours, average, square = weight.clone(), torch.zeros(6), torch.zeros(6)
    theirs = weight.clone().requires_grad_()
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    for step in (1, 2, 3):
        theirs.grad = draw(generator, 6)
        if form == "of core 0.8":
            npu_operators.npu_apply_adam_w(
                0.9 ** (step - 1), 0.99 ** (step - 1), 0.1, 0.01, 0.9, 0.99, 1e-8, theirs.grad, None, False, False,
                out=(ours, average, square),
            )  # fmt: skip
        else:
            npu_operators.fused_adamw(
                [ours], [theirs.grad], [average], [square], [], [torch.tensor(step)],
                lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        reference.step()
        torch.testing.assert_close(ours, theirs.detach())


def test_small_operators(generator: torch.Generator) -> None:
    x, gamma = draw(generator, 3, 8), draw(generator, 8)
    torch.testing.assert_close(npu_operators.npu_rms_norm(x, gamma, 1e-6)[0], functional.rms_norm(x, (8,), gamma, 1e-6))
    torch.testing.assert_close(npu_operators.npu_swiglu(x), functional.silu(x[:, :4]) * x[:, 4:])
    angle = draw(generator, 3, 4)
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    turned = npu_operators.npu_rotary_mul(x, cos, sin)
    torch.testing.assert_close(
        torch.complex(*turned.chunk(2, -1)), torch.complex(*x.chunk(2, -1)) * torch.exp(1j * angle)
    )


def test_a_process_with_the_stand_ins_takes_the_cpu_for_its_device() -> None:
    program = """
import importlib.util, npu_stand_ins, torch
import torch.distributed as dist
sent = []
dist.isend = lambda tensor, peer: sent.append(tensor)
npu_stand_ins.install(wide=True)
import torch_npu, torchair
from torch_npu.contrib import transfer_to_npu
from torchair.ge import Tensor
assert importlib.util.find_spec("apex") is not None and importlib.util.find_spec("torch_npu") is not None
x = torch.zeros(2, dtype=torch.bfloat16, device="cuda")
assert x.device.type == "cpu" and x.dtype is torch.float32 and x.type() == "torch.cuda.FloatTensor"
assert torch.ones(1).cuda().to(torch.device("npu")).bfloat16().dtype is torch.float32
assert torch.nn.Linear(2, 2).cuda()(x).shape == (2,) and torch.cuda.is_available()
assert torchair.register(object())(len) is len, "a decorator of a decorator"
try:
    torch_npu.npu_grouped_matmul(x)
except NotImplementedError as error:
    assert "npu_grouped_matmul" in str(error)
else:
    raise AssertionError("computed nothing")
output = torch.arange(6.0).reshape(2, 3).T
dist.isend(output, 0)
output.data = torch.empty(1)  # as a pipeline does while gloo still sends
assert sent[0].tolist() == [[0, 3], [1, 4], [2, 5]] and sent[0].is_contiguous()
assert dist.distributed_c10d.isend is dist.isend, "a batch of sends asks for it by that name"
from mm_autoparallel.profilers.device import find_device_type
assert find_device_type() == "cpu"
"""
    here = Path(compare_losses.__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(here), str(compare_losses.REPOSITORY)))}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


class Layer(torch.nn.Module):
    """One layer as Megatron has it: what is divided says along which dimension."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=True)
        self.weight = torch.nn.Parameter(torch.zeros(8 // ranks, 3))
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # type: ignore[attr-defined]
        self.bias = torch.nn.Parameter(torch.zeros(3))


def fill(ranks: int, rank: int, name: str, number: int, before: int, monkeypatch: pytest.MonkeyPatch) -> Layer:
    """A model whose only layer is `number` of its stage, behind `before` others, as this rank fills it."""
    core = ModuleType("megatron.core")
    core.parallel_state = SimpleNamespace(  # type: ignore[attr-defined]
        get_tensor_model_parallel_world_size=lambda: ranks, get_tensor_model_parallel_rank=lambda: rank
    )
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    layer = Layer(ranks)
    model = torch.nn.Module()
    here = model
    *folders, last = f"text_decoder.decoder.layers.{number}.{name}".split(".")
    for folder in folders:
        here.add_module(folder, torch.nn.Module())
        here = here.get_submodule(folder)
    here.add_module(last, layer)
    train_small_vlm.fill(model, {"vision": 0, "text": before})
    return layer


def test_first_weights_do_not_depend_on_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill(1, 0, "linear_proj", 3, 0, monkeypatch)
    torch.testing.assert_close(fill(1, 0, "linear_proj", 1, 2, monkeypatch).weight, whole.weight)
    assert not torch.equal(fill(1, 0, "linear_proj", 2, 2, monkeypatch).weight, whole.weight)


@pytest.mark.parametrize("name", ["linear_proj", "linear_fc1"])
def test_first_weights_do_not_depend_on_tensor_parallel_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill(1, 0, name, 0, 0, monkeypatch)
    parts = [fill(2, rank, name, 0, 0, monkeypatch) for rank in (0, 1)]
    joined = torch.cat([part.weight for part in parts])
    if name == "linear_fc1":  # each rank holds its part of gate and of up
        joined = torch.cat([part.weight.chunk(2)[half] for half in (0, 1) for part in parts])
    torch.testing.assert_close(joined, whole.weight)
    torch.testing.assert_close(parts[0].bias, parts[1].bias)


def test_samples_depend_on_their_number_alone() -> None:
    two, one = train_small_vlm.make_batch(range(2, 4)), train_small_vlm.make_batch(range(3, 4))
    torch.testing.assert_close(two["input_ids"][1:], one["input_ids"])
    torch.testing.assert_close(two["pixel_values"].chunk(2)[1], one["pixel_values"])
    assert (two["labels"] >= 0).sum(1).unique().numel() == 1, "a mean of means is the mean only then"


def ended(*losses: float, codes: tuple[int, ...] = (0,), output: str = "") -> Run:
    return Run(codes, losses, tuple(1.0 for _ in losses), 1.0, output)


def test_a_run_is_equal_within_rounding_alone() -> None:
    plain = ended(6.0, 5.5)
    assert compare_losses.judge_losses(ended(6.0, 5.50005), plain)[0] == "equal"
    assert compare_losses.judge_losses(ended(6.0, 5.51), plain)[0] == "same forward"
    assert compare_losses.judge_losses(ended(6.01, 5.5), plain)[0] == "differs"
    assert compare_losses.judge_losses(ended(6.0), plain)[0] == "crashes", "an iteration is missing"
    assert compare_losses.judge_losses(ended(6.0, 5.5, codes=(0, 1)), plain)[0] == "crashes"
    assert compare_losses.judge_losses(ended(6.0, math.nan), plain)[0] == "same forward"
    assert compare_losses.judge_losses(ended(math.nan, 5.5), plain)[0] == "differs"


def test_losses_are_read_from_megatrons_log() -> None:
    line = (
        " [2026-01-02 03:04:05] iteration        2/       3 | consumed samples:            8 | elapsed time per "
        "iteration (ms): 5.0 | loss: 6.380464E+00 | loss scale: 1.0 | grad norm: 1.857 | number of nan iterations: 0 |"
    )
    assert compare_losses.STEP.findall(line) == [("2", "6.380464E+00", "1.857")]


def test_a_refusal_has_exit_code_2_on_every_rank_and_no_traceback() -> None:
    assert compare_losses.is_refusal(ended(codes=(2, 2), output="plan: it places …"))
    assert not compare_losses.is_refusal(ended(codes=(2, 1), output="plan: it places …"))
    assert not compare_losses.is_refusal(ended(codes=(2, 2), output="Traceback (most recent call last)"))


def test_without_checkouts_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("REAL_MINDSPEED_MM", "REAL_MINDSPEED_MM_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["compare_losses.py"])
    compare_losses.main()
    assert "is not run" in capsys.readouterr().out
    monkeypatch.setenv("REAL_MINDSPEED_MM", f"26.0.0={tmp_path}")
    with pytest.raises(SystemExit, match="2"):
        compare_losses.main()
    assert "is no entry" in capsys.readouterr().err
    monkeypatch.setenv("REAL_MINDSPEED_MM", f"26.0.0={tmp_path}:{tmp_path}:{tmp_path}")
    with pytest.raises(SystemExit, match="2"):
        compare_losses.main()
    assert f"there is no {tmp_path / 'mindspeed_mm'}" in capsys.readouterr().err
