"""What an entry may say beside its figures: measured extras, out of memory, and the workload of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.layers import Layers
from mm_autoparallel.model.job.model import Decoder, Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.store import (
    ProfileEntry,
    Timing,
    file_name,
    make_manifest,
    read_profile_files,
    write_profile,
)
from mm_autoparallel.model.profiles.table import Point, ProfileTable, build_table

MODEL = Model(
    name="small",
    text=Decoder(vocab_size=1024, layers=Layers(num_layers=4, hidden_size=256, ffn_size=512, num_heads=4, norm="rms")),
)
WORKLOAD = Workload(global_batch_size=64, seq_length=2048)
COMMAND = "python pretrain_vlm.py --auto-parallel-mm"


def timing(median_ms: float) -> Timing:
    return Timing(median_ms=median_ms, mad_ms=0.01, num_samples=9)


def entry(tokens: int = 2048, forward_ms: float = 1.0, **changed: Any) -> ProfileEntry:
    figures: dict[str, Any] = {
        "forward_ms": timing(forward_ms),
        "backward_input_ms": timing(1.5),
        "backward_weight_ms": timing(0.75),
        "activation_bytes": 4000,
        "checkpoint_bytes": 400,
        "transient_bytes": 2000,
    }
    return ProfileEntry(**({"kind": "text_layer", "tp": 1, "mbs": 1, "tokens": tokens} | figures | changed))


def overfull(**changed: Any) -> ProfileEntry:
    return ProfileEntry(**({"kind": "text_layer", "tp": 1, "mbs": 1, "tokens": 2048, "out_of_memory": True} | changed))


def write(folder: Path, *entries: ProfileEntry, workload: Workload = WORKLOAD, mbs: int = 1) -> Path:
    path = folder / file_name(1, 1, mbs, workload)
    write_profile(path, make_manifest(MODEL, workload, "cpu", {"torch": "2.13.0"}, COMMAND), entries)
    return path


def table(folder: Path, workload: Workload = WORKLOAD) -> ProfileTable:
    files = read_profile_files([folder], MODEL, "cpu", workload)
    return build_table(files, ["text_pre", "text_layer", "text_post"])


def point(**changed: Any) -> Point:
    return Point(**({"kind": "text_layer", "tp": 1, "cp": 1, "mbs": 1, "tokens": 2048, "spans": 1} | changed))


EXTRAS: dict[str, Any] = {
    "recompute_ms": timing(0.9),
    "optimizer_ms": timing(0.4),
    "parameter_count": 1000,
    "output_bytes": 512,
    "arrangement": "shard",
}


class TestExtras:
    def test_they_come_with_the_figures(self, tmp_path: Path) -> None:
        write(tmp_path, entry(**EXTRAS))
        found = table(tmp_path).look_up(point())
        assert found
        assert (found.recompute_ms, found.optimizer_ms) == (0.9, 0.4)
        assert (found.parameter_count, found.output_bytes, found.arrangement) == (1000, 512, "shard")

    def test_a_file_without_them_has_none(self, tmp_path: Path) -> None:
        write(tmp_path, entry())
        found = table(tmp_path).look_up(point())
        assert found
        assert (found.recompute_ms, found.optimizer_ms, found.parameter_count, found.output_bytes) == (None,) * 4
        assert found.arrangement == ""

    def test_between_two_points_only_what_grows_grows(self, tmp_path: Path) -> None:
        longer = EXTRAS | {"recompute_ms": timing(1.8), "output_bytes": 1024}
        write(tmp_path, entry(1024, **EXTRAS), entry(2048, **longer))
        found = table(tmp_path).look_up(point(tokens=1536))
        assert found
        assert found.recompute_ms == pytest.approx(1.35)
        assert found.output_bytes == pytest.approx(768)
        assert (found.optimizer_ms, found.parameter_count) == (0.4, 1000)

    def test_what_one_side_lacks_is_not_made_up(self, tmp_path: Path) -> None:
        write(tmp_path, entry(1024, **EXTRAS), entry(2048))
        found = table(tmp_path).look_up(point(tokens=1536))
        assert found
        assert (found.recompute_ms, found.output_bytes) == (None, None)


class TestOutOfMemory:
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"out_of_memory": True}, "it is out_of_memory and gives forward_ms, .* leave either out"),
            (
                {"activation_bytes": None},
                "activation_bytes is missing; only an entry that is out_of",
            ),
        ],
    )
    def test_figures_and_memory_exclude_each_other(self, changed: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            entry(**changed)

    def test_the_reason_names_point_kind_and_file(self, tmp_path: Path) -> None:
        path = write(tmp_path, overfull(mbs=4), mbs=4)
        reason = table(tmp_path).overfull_reason(point(mbs=4))
        expected = f"TP 1, CP 1, MBS 4, 2048 tokens: text_layer ran out of memory when it was profiled (file {path})"
        assert reason == expected

    @pytest.mark.parametrize("heavier", [{"mbs": 8}, {"tokens": 4096}, {"mbs": 8, "tokens": 8192}])
    def test_more_work_does_not_fit_either(self, tmp_path: Path, heavier: dict[str, int]) -> None:
        write(tmp_path, overfull(mbs=4), mbs=4)
        reason = table(tmp_path).overfull_reason(point(**({"mbs": 4} | heavier)))
        assert reason
        assert "profiled at TP 1, CP 1, MBS 4, 2048 tokens" in reason

    @pytest.mark.parametrize(
        "lighter",
        [{"mbs": 2}, {"mbs": 4, "tp": 2}, {"mbs": 4, "cp": 2}, {"mbs": 4, "tokens": 1024}, {"mbs": 4, "spans": 2}],
    )
    def test_less_work_may_fit(self, tmp_path: Path, lighter: dict[str, int]) -> None:
        write(tmp_path, overfull(mbs=4), mbs=4)
        assert table(tmp_path).overfull_reason(point(**lighter)) is None
        assert table(tmp_path).overfull_reason(point(kind="text_post", mbs=4)) is None

    def test_what_was_measured_fits_whatever_else_ran_out(self, tmp_path: Path) -> None:
        write(tmp_path, overfull())
        write(tmp_path, entry(mbs=2), mbs=2)
        assert table(tmp_path).overfull_reason(point(mbs=2)) is None
        assert table(tmp_path).overfull_reason(point(mbs=4))

    def test_a_kind_that_only_ran_out_is_known(self, tmp_path: Path) -> None:
        write(tmp_path, overfull(mbs=4), mbs=4)
        with pytest.raises(ProfileError, match="there is: what ran out of memory"):
            table(tmp_path).look_up(point(mbs=1))


class TestWorkloads:
    """One folder holds profiles of several workloads: they share points."""

    def test_that_of_the_job_counts(self, tmp_path: Path) -> None:
        for images, forward_ms in ((0, 1.0), (512, 2.0), (1024, 3.0)):
            workload = WORKLOAD.model_copy(update={"image_tokens_per_sample": images})
            write(tmp_path, entry(forward_ms=forward_ms), workload=workload)
        for images, forward_ms in ((0, 1.0), (512, 2.0), (1024, 3.0)):
            found = table(tmp_path, WORKLOAD.model_copy(update={"image_tokens_per_sample": images})).look_up(point())
            assert found
            assert found.forward_ms == forward_ms

    def test_one_file_may_still_not_contradict_itself(self, tmp_path: Path) -> None:
        write(tmp_path, entry(), entry(forward_ms=2.0))
        with pytest.raises(ProfileError, match="keep one of the two"):
            table(tmp_path)

    def test_another_precision_is_another_profile(self, tmp_path: Path) -> None:
        single = WORKLOAD.model_copy(update={"weight_bytes": 4.0})
        write(tmp_path, entry(forward_ms=1.0))
        path = write(tmp_path, entry(forward_ms=2.0), workload=single)
        found = table(tmp_path, single).look_up(point())
        assert found
        assert found.forward_ms == 2.0
        half = WORKLOAD.model_copy(update={"gradient_bytes": 2.0})
        with pytest.raises(ProfileError, match=r"measured with .* bytes a parameter .* has 2 \+ 2 \+ 12") as told:
            table(tmp_path, half)
        assert COMMAND in str(told.value)
        assert path.parent == tmp_path


def test_what_is_missing_names_the_command_that_measures_it(tmp_path: Path) -> None:
    write(tmp_path, entry())
    with pytest.raises(ProfileError, match=rf"by the command that made these files \(.*`{COMMAND}`\)"):
        table(tmp_path).look_up(point(mbs=2))
