"""A YAML for another division: what must change changes, with all that repeats it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.divided_yaml import PROFILING, format_divided
from mm_autoparallel.integrations.mindformers.dry_runs import read_dry_runs
from mm_autoparallel.integrations.mindformers.layout import Layout, read_layout
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.units import MIB

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mindformers" / "pretrain_deepseek3_1024.yaml"
SWAP = ROOT / "tests" / "fixtures" / "mindformers" / "512_8k_swap.yaml"


def changed_keys(before: Any, after: Any, path: str = "") -> set[str]:
    """The keys whose values differ, lists as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {
            key
            for name in {*before, *after}
            for key in changed_keys(before.get(name), after.get(name), f"{path}.{name}" if path else name)
        }
    return set() if before == after else {path}


@pytest.fixture
def divided(tmp_path: Path) -> Callable[..., tuple[str, Pretrain]]:
    """The text of a YAML divided otherwise, and what is read of it."""

    def divide(source: Path, edit: Callable[[str], str], layout: Layout, output: str | None, **sizes: Any) -> Any:
        (tmp_path / "before.yaml").write_text(edit(source.read_text(encoding="utf-8")), encoding="utf-8")
        pretrain = read_pretrain(tmp_path / "before.yaml")
        text = format_divided(pretrain, replace(pretrain, **sizes), layout, output)
        (tmp_path / "after.yaml").write_text(text, encoding="utf-8")
        return pretrain.text, read_pretrain(tmp_path / "after.yaml")

    return divide


@pytest.mark.parametrize("by_anchor", [True, False])
def test_anchors_and_repetitions_follow(divided: Callable[..., Any], by_anchor: bool) -> None:
    def spell_out(text: str) -> str:
        for name, value in (("dp", 16), ("micro_batch_num", 64), ("num_layers", 61)):
            text = text.replace(f"&{name} ", "").replace(f"*{name}", str(value))
        return text

    layout = Layout(((4, 3),), ((4, 0),))
    sizes = {"dp": 8, "pp": 2, "ep": 16, "num_layers": 7, "num_microbatches": 128}
    before, after = divided(EXAMPLE, (lambda text: text) if by_anchor else spell_out, layout, "out/X", **sizes)
    assert (after.dp, after.tp, after.pp, after.ep, after.num_layers) == (8, 4, 2, 16, 7)
    assert read_layout(after) == layout
    document = yaml.safe_load(after.text)
    assert document["parallel"]["dataset_strategy"] == [[8, 1], [8, 1]]
    assert (document["callbacks"][0]["num_layers"], document["callbacks"][0]["micro_batch_num"]) == (6, 128)
    assert changed_keys(yaml.safe_load(before), document) == {
        *(
            f"parallel_config.{key}"
            for key in ("data_parallel", "pipeline_stage", "expert_parallel", "micro_batch_num")
        ),
        *("model.model_config.num_layers", "model.model_config.offset", "recompute_config.recompute"),
        *("parallel.dataset_strategy", "callbacks", "profile_output"),
        *(path[0] for path in PROFILING),
    }
    comments = [line.split("#")[1] for line in before.splitlines() if "#" in line]
    assert comments == [line.split("#")[1] for line in after.text.splitlines() if "#" in line]


def test_chunks_and_batches_are_written_where_they_change(divided: Callable[..., Any]) -> None:
    layout = Layout(((31, 31),), ((31, 30),))
    sizes = {
        "pp": 2,
        "dp": 64,
        "vp": 1,
        "mbs": 2,
        "num_microbatches": 30,
        "optimizer_parallel": False,
        "cp": 2,
        "tp": 1,
    }
    before, after = divided(SWAP, lambda text: text, layout, None, **sizes)
    assert (after.vp, after.mbs, after.optimizer_parallel, after.cp, after.tp) == (1, 2, False, 2, 1)
    assert read_layout(after) == layout
    changed = changed_keys(yaml.safe_load(before), yaml.safe_load(after.text))
    assert "model.model_config.pp_interleave_num" in changed
    assert not {key for key in changed if key.startswith("profile")}


def test_a_data_set_needs_its_key(tmp_path: Path) -> None:
    pretrain = read_pretrain(EXAMPLE)
    layout = Layout(((4,) * 14 + (3, 3),), ((0,) * 16,))
    with pytest.raises(JobError, match=r"train_dataset\.data_loader\.dataset_dir is missing"):
        format_divided(pretrain, pretrain, layout, None, "wiki")
    path = tmp_path / "with.yaml"
    path.write_text(f"{pretrain.text}train_dataset: {{data_loader: {{dataset_dir: old}}}}\n", encoding="utf-8")
    text = format_divided(read_pretrain(path), pretrain, layout, None, "wiki")
    assert yaml.safe_load(text)["train_dataset"]["data_loader"]["dataset_dir"] == "wiki"


LINE = "MindSpore memory base address: 0\nUsed peak memory usage (without fragments): {}M\n"


def test_peaks_of_dry_runs_are_read(tmp_path: Path) -> None:
    for name, text in (("dryrun_DP16_TP4_PP16_EP8_pretrain", LINE.format(48874)), ("DP8_TP4_PP32_EP4", LINE.format(5))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dryrun_new.log").write_text(text)
    (tmp_path / "notes").mkdir()
    assert read_dry_runs(tmp_path) == {(16, 4, 16, 8): 48874 * MIB, (8, 4, 32, 4): 5 * MIB}


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ({}, ["no folder in it"]),
        ({"DP1_TP1_PP1_EP1": None}, ["DP1_TP1_PP1_EP1", "no log"]),
        ({"DP1_TP1_PP1_EP1": "Traceback"}, ["DP1_TP1_PP1_EP1", "Used peak memory usage"]),
        ({"DP1_TP1_PP1_EP1": LINE.format("9" * 400)}, ["DP1_TP1_PP1_EP1", "more than 12 digits"]),
        ({"DP1_TP1_PP1_EP1": LINE.format("9" * 5000)}, ["DP1_TP1_PP1_EP1", "more than 12 digits"]),
        ({"DP1_TP1_PP1_EP1": LINE, "old_DP1_TP1_PP1_EP1": LINE}, ["both", "keep one"]),
    ],
)
def test_dry_runs_that_tell_nothing_are_named(tmp_path: Path, folders: dict[str, str | None], words: list[str]) -> None:
    for name, text in folders.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "dryrun_new.log").write_text(text.format(1))
    with pytest.raises(JobError) as error:
        read_dry_runs(tmp_path)
    for word in words:
        assert word in str(error.value)
