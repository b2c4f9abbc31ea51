"""The training script under orders from a file: backwards in two parts, V-shapes and frozen parts compute the gradients
of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_ranks import ForkedRanks
from gradients import check, start

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("skimage")
pytest.importorskip("safetensors")

ORDERS = {
    "parted.csv": (  # as ZB-H1 has it: each stage has as many micro-batches in flight as under 1F1B
        "0F0,0F1,0I0,0F2,0I1,0W0,0F3,0I2,0W1,0I3,0W2,0W3\n"
        "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3\n"
    ),
    "v_shaped.csv": (  # as ZB-V has it; some backwards are whole
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0B1,3F3,3I3,0I2,0W2,0B3,3W3\n"
        "1F0,2F0,1F1,2F1,1F2,2F2,2I0,2W0,1B0,1F3,2I1,2F3,1I1,2W1,1W1,2B2,1B2,2B3,1B3\n"
    ),
    "paired.csv": (
        "0F0,0F1,0F2,3F0,(3F1;3B0)OVERLAP_F_B,(0F3;3B1)OVERLAP_F_B,0B0,3F2,3B2,0B1,3F3,3I3,0B2,3W3,0B3\n"
        "1F0,2F0,1F1,2F1,1F2,2F2,2I0,1B0,2W0,(1F3;2B1)OVERLAP_F_B,2F3,1I1,1W1,2B2,1B2,2B3,1B3\n"
    ),
}  # fmt: skip

TWO = "--pipeline-model-parallel-size 2"
CUT = f"{TWO} --vit-layer-placement 3,1 --llm-layer-placement 0,5"
VISION_ALONE = f"{TWO} --vit-layer-placement 4,0 --llm-layer-placement 0,5"
CHUNKS = f"{TWO} --vit-layer-placement 1,3,0,0 --llm-layer-placement 0,1,3,1"

# name → flags; those of one process are there too
RUNS = {
    "parted": f"{CUT} --pipeline-order parted.csv",
    "parted-recomputed": f"{CUT} --pipeline-order parted.csv --vit-layer-recompute 1,1 --llm-layer-recompute 0,3",
    "v-shaped": f"{CHUNKS} --pipeline-order v_shaped.csv",
    "paired": f"{CHUNKS} --pipeline-order paired.csv",
    "frozen-1f1b": f"{VISION_ALONE} --freeze-ViT",
    "frozen-parted": f"{CUT} --pipeline-order parted.csv --freeze-ViT",
    "frozen-v-shaped": f"{CHUNKS} --pipeline-order v_shaped.csv --freeze-ViT",
}
BY_DAY = ("parted-recomputed", "v-shaped", "paired", "frozen-v-shaped")
"""One of each kind; the others by night."""
FOUR = {
    "replicas": f"{CUT} --pipeline-order parted.csv --global-batch-size 8",
    "replicas-v-shaped": f"{CHUNKS} --pipeline-order v_shaped.csv --global-batch-size 8 --use-distributed-optimizer",
    "sharded": f"{CUT} --pipeline-order parted.csv --global-batch-size 8 --use-torch-fsdp2",
    "divided": f"{CHUNKS} --pipeline-order v_shaped.csv --tensor-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_flags: str, forked_ranks: ForkedRanks) -> Path:
    folder = tmp_path_factory.mktemp("orders")
    flags = f"{small_flags} --init-method-std 0.05"
    alone = {"whole": flags, "whole-frozen": f"{flags} --freeze-ViT"}
    told = start(forked_ranks, folder, {1: alone, 2: {name: f"{flags} {RUNS[name]}" for name in BY_DAY}}, ORDERS)
    (folder / "output.txt").write_text(told, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_DAY)
def test_gradients_equal_those_of_one_process(name: str, runs: Path) -> None:
    check(runs, name, "whole-frozen" if "frozen" in name else "whole")


@pytest.mark.slow
def test_whole_backwards_in_the_place_of_parted_ones_are_told(runs: Path) -> None:
    told = (runs / "output.txt").read_text(encoding="utf-8")
    assert told.count("note: virtual stage 0: each I and W is written as one B") == 2
    assert told.count("note: virtual stage 1: each I and W is written as one B, because torch's W would run each") == 1
    assert told.count("note: virtual stages 0, 1: each I and W is written as one B") == 1


@pytest.mark.nightly
def test_gradients_of_other_runs_equal_those_of_one_process(
    tmp_path: Path, small_flags: str, forked_ranks: ForkedRanks
) -> None:
    flags = f"{small_flags} --init-method-std 0.05"
    others = [name for name in RUNS if name not in BY_DAY]
    alone = {"whole": flags, "whole-frozen": f"{flags} --freeze-ViT"}
    start(forked_ranks, tmp_path, {1: alone, 2: {name: f"{flags} {RUNS[name]}" for name in others}}, ORDERS)
    for name in others:
        check(tmp_path, name, "whole-frozen" if "frozen" in name else "whole")


@pytest.mark.nightly
def test_gradients_of_replicas_and_shards_equal_those_of_one_process(
    tmp_path: Path, small_flags: str, forked_ranks: ForkedRanks
) -> None:
    """Where weight gradients are computed apart, the hooks of DistributedDataParallel do not see them, and FSDP2 must
    not have given weights back."""
    flags = f"{small_flags} --init-method-std 0.05"
    alone = {"whole": f"{flags} --global-batch-size 8", "whole-four": flags}
    start(forked_ranks, tmp_path, {1: alone, 4: {name: f"{flags} {extra}" for name, extra in FOUR.items()}}, ORDERS)
    for name in ("replicas", "replicas-v-shaped", "sharded"):
        check(tmp_path, name, "whole")
    check(tmp_path, "divided", "whole-four", 1e-5)  # matrices divided among ranks add up in another order


@pytest.mark.parametrize(
    ("order", "flags", "told"),
    [
        ("parted.csv", "", "orders stages, and there is one"),
        ("parted.csv", f"{TWO} --num-virtual-stages-per-pipeline-rank 2", "has 1 chunks a stage, and the flags of"),
        ("parted.csv", "--pipeline-model-parallel-size 3", "2 rows, and 3 pipeline ranks"),
        ("missing.csv", TWO, "schedule missing.csv"),
    ],
)  # fmt: skip
def test_orders_that_do_not_fit_are_named(
    order: str, flags: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arguments import make_parser, read_model_document, read_parallelism
    from failures import TrainingError
    from mm_autoparallel.errors import PlanError

    monkeypatch.chdir(tmp_path)
    Path("parted.csv").write_text(ORDERS["parted.csv"], encoding="utf-8")
    arguments = make_parser().parse_args(f"{flags} --pipeline-order {order}".split())
    with pytest.raises((TrainingError, PlanError)) as error:
        read_parallelism(arguments, read_model_document(arguments), 6)
    assert told in str(error.value)


def test_an_order_of_other_micro_batches_is_refused() -> None:
    from failures import TrainingError
    from mm_autoparallel.pipeline.schedules.torch_csv import read_csv
    from model import Piece
    from pipeline import Layout, find_order

    pieces = ((Piece("vision", "layer"),), (Piece("text", "layer"),))
    with pytest.raises(TrainingError, match="is of 4 micro-batches, and a step has 8"):
        find_order(Layout(pieces, 8, 1, "1f1b", read_csv(ORDERS["parted.csv"])), 2)
