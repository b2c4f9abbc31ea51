"""The training script under torch.distributed.run: every way to divide a run gives the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_ranks import ForkedRanks

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("skimage")
pytest.importorskip("safetensors")

RUN_FLAGS = Path(__file__).with_name("run_flags.py")

PIPELINE = "--pipeline-model-parallel-size 2"
PLAN = {
    "parallel_config": {"PP": 2, "TP": 1, "DP": 1, "MBS": 2},
    "layer_placement": {"vit_layer_placement": [3, 1], "llm_layer_placement": [0, 5]},
    "layer_recompute": {"vit_layer_recompute": [2], "llm_layer_recompute": [0, 3]},
    "e2e_time": 123.4,
}

_ONE = {"PP": 1, "TP": 1, "DP": 2, "MBS": 1, "rank_offset": 0}
PREFETCH = {
    "parallel_config": {"PP": 2, "TP": 1, "DP": 1, "MBS": 1},
    "layer_placement": {"llm_layer_placement": [2, 3]},
    "layer_recompute": {"llm_layer_recompute": [1, 0]},
    "layout": {
        "kind": "colocated",
        "encoder_run": "prefetch",
        "modules": {"vision": _ONE, "llm": _ONE | {"PP": 2, "DP": 1}},
    },
    "order": [
        ["0F0", "1F0", "1F0@vision", "0B0", "2F0", "1B0", "3F0", "3F0@vision", "2B0", "3B0"],
        ["0F0", "0B0", "0F0@vision", "1F0", "1B0", "2F0", "2B0", "3F0", "3B0", "2F0@vision"],
    ],
}
"""Nothing of the encoder trains; each stage makes half of the next step's features."""
FIXED = "--freeze-ViT --freeze-projector"

NUM_STEPS = 3

# name → (flags, relative tolerance of the losses against one process with the same limit on gradients)
RUNS = {
    "vision-cut": (f"{PIPELINE} --vit-layer-placement 3,1 --llm-layer-placement 0,5 --vit-layer-recompute 2,0", 1e-5),
    "text-cut": (f"{PIPELINE} --vit-layer-placement 4,0 --llm-layer-placement 2,3 --llm-layer-recompute 1,2", 1e-5),
    "interleaved": (
        f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2 --vit-layer-placement 1,3,0,0 "
        "--llm-layer-placement 0,1,3,1 --vit-layer-recompute 1,1,0,0",
        1e-5,
    ),
    "plan": ("--auto-parallel-config plan.json", 1e-5),
    "prefetch": (f"{FIXED} --auto-parallel-config prefetch.json", 1e-5),
    "frozen-chain": (f"{FIXED} {PIPELINE} --vit-layer-placement 4,0 --llm-layer-placement 0,5", 1e-5),
    "too-few-micro-batches": (f"{PIPELINE} --micro_batch_size 4", 1e-5),
    "tensor": ("--tensor-model-parallel-size 2 --save tensor", 1e-4),
    "clipped": ("--tensor-model-parallel-size 2 --clip-grad 0.5", 1e-4),
    "fsdp": ("--use-torch-fsdp2", 1e-4),
    "ddp": ("--log-memory", 1e-4),
    "zero": ("--use-distributed-optimizer --log-memory --save zero", 1e-4),
}

UNEVEN = "--uneven-images --seq-length 96 --image-size 112 --global-batch-size 8"
DEALT = {
    "arrival": f"{UNEVEN} --micro-batch-size 2",
    "balanced": f"{UNEVEN} --micro-batch-size 2 --balance-samples --use-distributed-optimizer",
}
"""Samples that differ, as they arrive and as the planner deals them."""


def start(ranks: ForkedRanks, folder: Path, num_processes: int, runs: dict[str, str]) -> None:
    """Run every line of flags in turn in `folder`, each with a log of its own."""
    lines = [f"{flags} --log-file {name}.jsonl" for name, flags in runs.items()]
    (folder / "flags.txt").write_text("\n".join(lines), encoding="utf-8")
    for name, plan in (("plan", PLAN), ("prefetch", PREFETCH)):
        (folder / f"{name}.json").write_text(json.dumps(plan), encoding="utf-8")
    told = ranks.run(RUN_FLAGS, ["flags.txt"], num_processes, folder, [])
    (folder / "output.txt").write_text(told, encoding="utf-8")


def entries(log: Path, key: str) -> list[dict]:
    found = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [entry for entry in found if key in entry]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, small_flags: str, forked_ranks: ForkedRanks) -> Path:
    """A folder with the log of every run; `one` is that of one process, `one-long` goes on."""
    folder = tmp_path_factory.mktemp("runs")
    flags = f"{small_flags} --train-iters {NUM_STEPS}"
    alone = {
        "one": f"{flags} --save one",
        "one-clipped": f"{flags} --clip-grad 0.5",
        "one-fixed": f"{flags} {FIXED}",
    }
    start(
        forked_ranks,
        folder,
        1,
        alone | {"one-long": f"{small_flags} --train-iters 14", "one-uneven": f"{flags} {UNEVEN}"},
    )
    extras = {name: extra for name, (extra, _) in RUNS.items()} | DEALT
    start(forked_ranks, folder, 2, {name: f"{flags} {extra}" for name, extra in extras.items()})
    return folder


def losses(log: Path) -> list[float]:
    return [entry["loss"] for entry in entries(log, "loss")]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_one_process(name: str, logs: Path) -> None:
    alone = {"clipped": "one-clipped", "prefetch": "one-fixed", "frozen-chain": "one-fixed"}.get(name, "one")
    expected = losses(logs / f"{alone}.jsonl")
    assert len(expected) == NUM_STEPS
    assert losses(logs / f"{name}.jsonl") == pytest.approx(expected, rel=RUNS[name][1])


@pytest.mark.slow
def test_samples_have_the_same_losses_whoever_runs_them(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which took longer is printed; two processes share their cores with other tests."""
    whole, arrival, balanced = (entries(logs / f"{name}.jsonl", "loss") for name in ("one-uneven", *DEALT))
    assert len(whole) == NUM_STEPS
    for rows in zip(whole, arrival, balanced, strict=True):
        assert len(set(rows[0]["sample_losses"])) == len(rows[0]["sample_losses"]) == 8
        for row in rows[1:]:
            assert row["sample_losses"] == pytest.approx(rows[0]["sample_losses"], rel=1e-4)
            assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4)
    assert [row["micro_batches"] for row in arrival] != [row["micro_batches"] for row in balanced]
    with capsys.disabled():
        took_ms = [sorted(row["elapsed_ms"] for row in rows)[NUM_STEPS // 2] for rows in (arrival, balanced)]
        print(f"\na step in arrival order {took_ms[0]:.0f} ms, balanced {took_ms[1]:.0f} ms")


@pytest.mark.slow
def test_a_limit_on_gradients_changes_the_run(logs: Path) -> None:
    assert losses(logs / "one-clipped.jsonl")[-1] != pytest.approx(losses(logs / "one.jsonl")[-1], rel=1e-5)


@pytest.mark.slow
def test_a_plans_step_is_compared_with_the_measured_one(logs: Path) -> None:
    assert (logs / "output.txt").read_text(encoding="utf-8").count("step time: planned 123.4 ms, measured ") == 1


@pytest.mark.slow
def test_loss_falls(logs: Path) -> None:
    found = losses(logs / "one-long.jsonl")
    assert sum(found[-4:]) / 4 < found[0] - 0.3


@pytest.mark.slow
def test_memory_is_told_per_rank(logs: Path) -> None:
    """Replicas hold equal weights; ZeRO 1 divides the optimizer's two moments between them, nothing else."""
    whole, sharded = entries(logs / "ddp.jsonl", "rank"), entries(logs / "zero.jsonl", "rank")
    assert [(row["rank"], row["stage"], row["replica"]) for row in whole] == [(0, 0, 0), (1, 0, 1)]
    for row, half in zip(whole, sharded, strict=True):
        assert row["gradient_bytes"] == row["parameter_bytes"] == half["parameter_bytes"] == half["gradient_bytes"]
        assert row["optimizer_bytes"] == 2 * row["parameter_bytes"]
        assert half["activation_bytes"] == row["activation_bytes"] > 0
    total = sum(row["optimizer_bytes"] for row in sharded)
    assert total == whole[0]["optimizer_bytes"]
    assert max(row["optimizer_bytes"] for row in sharded) < 0.55 * total


@pytest.mark.slow
def test_progress_is_told_as_megatron_tells_it(logs: Path) -> None:
    lines = [line for line in (logs / "output.txt").read_text(encoding="utf-8").splitlines() if " iteration " in line]
    assert len(lines) == NUM_STEPS * len(RUNS | DEALT), "one rank prints"
    for words in (
        f"iteration        1/{NUM_STEPS:8d} |",
        "consumed samples:",
        "elapsed time per iteration (ms):",
        "tokens/s:",
    ):
        assert words in lines[0]
    for words in ("learning rate: 3.000000E-03 |", "lm loss: ", "peak memory (MiB): "):
        assert words in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "zero"])
def test_checkpoints_are_alike_and_load_in_hugging_face(name: str, logs: Path) -> None:
    """Fused query-key-value rows that tensor parallel ranks hold in another order are written in the model's order."""
    from safetensors.torch import load_file
    from transformers import Qwen2VLForConditionalGeneration

    expected, found = ({}, {})
    for folder, tensors in (("one", expected), (name, found)):
        for file in (logs / folder).glob("*.safetensors"):
            tensors.update(load_file(file))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        # attention ignores its keys' biases, so their gradients are rounding alone, of which Adam makes steps
        tolerance = 1e-2 if key.endswith("k_proj.bias") else 1e-3
        assert (found[key] - tensor).norm() <= tolerance * tensor.norm(), key
    model = Qwen2VLForConditionalGeneration.from_pretrained(logs / name)
    assert {key: value.shape for key, value in model.state_dict().items()} == {k: v.shape for k, v in expected.items()}
    name_of_qkv = "model.visual.blocks.1.attn.qkv.weight"
    assert torch.equal(model.state_dict()[name_of_qkv], found[name_of_qkv])
