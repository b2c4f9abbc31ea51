"""The laws of placement against the forward passes of a real checkout, where MINDSPEED_MM_CHECKOUT names one.

Methods are taken out of its sources and run with stand-ins for the modules around them (test_mindspeed_mm_checkout.py).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mm_autoparallel.integrations.mindspeed_mm.checkout import counts_chunks
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
from mm_autoparallel.model.job.mindspeed_mm_law import placement_reasons
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload

NAMED = os.environ.get("MINDSPEED_MM_CHECKOUT")
PACKAGE = Path(NAMED or "none") / "mindspeed_mm"
ENCODERS = PACKAGE / "models" / "vision" / "vision_encoders"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models" / "qwen2.5vl_7b.json"
WORKLOAD = Workload(global_batch_size=8, seq_length=8, stack="mindspeed-mm")
FULL = (1, 3)
"""Layers of six that see whole images."""

pytestmark = pytest.mark.skipif(NAMED is None, reason="MINDSPEED_MM_CHECKOUT names no checkout of MindSpeed-MM")


class Anything:
    """Whatever a method looks up beside what is tested."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        return Anything()


def method(path: Path, owner: str, name: str, **given: Any) -> Any:
    """The method `name` of class `owner`, without its annotations, in a scope with `given`."""
    tree = ast.parse(path.read_text())
    (kind,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
    (found,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name]
    for argument in (*found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    found.returns = None
    names = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)}
    scope: dict[str, Any] = {key: Anything() for key in names if key not in vars(builtins)}
    exec(compile(ast.Module(body=[found], type_ignores=[]), str(path), "exec"), scope | given, local := {})
    return local[name]


def seen_masks(rows: list[list[int]], chunk: int, stage: int) -> list[str]:
    """What the layers of one virtual stage see under model.json's `rows`, by the block's own forward."""
    seen: list[str] = []

    def layer(attention_mask: str, **_options: Any) -> tuple[Any, None]:
        seen.append(attention_mask)
        return torch.zeros(1), None

    vpp = len(rows)
    mpu = SimpleNamespace(
        get_pipeline_model_parallel_rank=lambda: stage,
        get_virtual_pipeline_model_parallel_rank=lambda: chunk if vpp > 1 else None,
    )
    config = SimpleNamespace(
        sequence_parallel=False,
        fp8=None,
        window_attn_size=112,
        fullatt_block_indexes=list(FULL),
        pipeline_num_layers=rows if vpp > 1 else rows[0],
        recompute_granularity=None,
        cpu_offloading=False,
        context_parallel_size=1,
    )
    forward = method(
        ENCODERS / "vision_transformer_block.py",
        "Qwen2VLVisionTransformerBlock",
        "forward",
        mpu=mpu,
        torch=torch,
        nullcontext=nullcontext,
        make_viewless_tensor=lambda inp, **_: inp,
        get_args=lambda: SimpleNamespace(use_flash_attn=False),
    )
    this = SimpleNamespace(
        pre_process=True,
        post_process=False,
        config=config,
        training=True,
        layers=[layer] * rows[chunk][stage],
        offload_context=nullcontext(),
        group_prefetch_offload_commit_async=None,
    )
    lengths = torch.tensor([0, 1])
    known = inspect.signature(forward).parameters  # 2.0 does not hand on lengths
    given = {name: lengths for name in ("cu_seqlens", "cu_window_seqlens") if name in known}
    forward(this, torch.zeros(1), "full", window_mask="window", **given)
    return seen


@pytest.fixture(scope="module")
def model() -> Model:
    """Six layers of a tower with windows, ten of text."""
    model = read_model_json(FIXTURE)
    (encoder,) = model.encoders
    assert encoder.layers.window
    window = encoder.layers.window.model_copy(update={"full_layers": FULL})
    layers = encoder.layers.model_copy(update={"num_layers": 6, "window": window})
    return model.model_copy(update={"encoders": (encoder.model_copy(update={"layers": layers}),)})


@pytest.mark.parametrize(
    ("rows", "right"),
    [
        ([[6, 0]], True),
        ([[4, 2]], True),
        ([[6, 0], [0, 0]], True),
        ([[5, 1], [0, 0]], None),
        ([[3, 1], [2, 0]], False),
        ([[2, 2], [1, 1]], False),
    ],
)
def test_windows(model: Model, rows: list[list[int]], right: bool | None) -> None:
    """Whole images are seen by the layers that should exactly where the law allows the placement."""
    strategy = Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=len(rows))
    counts = tuple(count for row in rows for count in row)
    last = max(k for k, count in enumerate(counts) if count)
    text = tuple(0 if k < last else 10 if k == last else 0 for k in range(len(counts)))
    layers = {"vision": counts, "text": text}
    reasons = [*placement_reasons(model, WORKLOAD, strategy, layers, counts_chunks(PACKAGE))]
    seen: list[str] = []
    try:
        for k in range(len(counts)):
            if counts[k]:
                seen += seen_masks(rows, *divmod(k, 2))
    except TypeError:  # a list for each chunk where numbers are added
        seen = []
    is_right = seen == ["full" if index in FULL else "window" for index in range(6)]
    assert is_right is (counts_chunks(PACKAGE) if right is None else right)
    assert bool(reasons) is not is_right


@pytest.mark.parametrize(("sizes", "breaks"), [({"tp": 2}, True), ({"tp": 1, "cp": 2}, True), ({"tp": 1}, False)])
def test_tokens_of_a_later_stage(model: Model, sizes: dict[str, int], breaks: bool) -> None:
    """The tower's own forward on a stage that is not its first: what divides tokens is given none."""
    strategy = Strategy(**({"pp": 2, "dp": 1, "mbs": 1} | sizes))
    reasons = [*placement_reasons(model, WORKLOAD, strategy, {"vision": (4, 2), "text": (0, 10)})]
    assert bool(reasons) is breaks
    forward = method(
        ENCODERS / "qwen2vl_vit_model.py",
        "Qwen2VLViT",
        "forward",
        torch=torch,
        F=torch.nn.functional,
        get_args=lambda: SimpleNamespace(use_flash_attn=True, sequence_parallel=strategy.tp > 1),
        mpu=SimpleNamespace(
            get_context_parallel_world_size=lambda: strategy.cp, get_context_parallel_group=lambda: None
        ),
        scatter_to_sequence_parallel_region=lambda tokens: tokens.size(0),
        gather_from_sequence_parallel_region=lambda tokens: tokens,
    )
    this = SimpleNamespace(
        pre_process=False,
        spatial_merge_size=2,
        config=SimpleNamespace(window_attn_size=None),
        rot_pos_emb=lambda _: torch.zeros(16, 8),
        blocks=lambda **options: options["hidden_states"],
    )
    pixels, grid = torch.zeros(16, 8), torch.tensor([[1, 4, 4]])
    if breaks:
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
            forward(this, pixels, grid)
    else:
        assert forward(this, pixels, grid)[0] is None  # its tokens come from the stage before, in the block
