"""The store: names, whole files or none, what is missing, what is stale, and disks that say no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.layers import Layers
from mm_autoparallel.model.job.model import Decoder, Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.disk import STRAY_S, clear_strays
from mm_autoparallel.model.profiles.store import (
    Manifest,
    ProfileEntry,
    Timing,
    check_fresh,
    file_name,
    make_manifest,
    missing_configurations,
    profile_folder,
    read_profile,
    read_profile_files,
    write_profile,
)

DECODER = Decoder(vocab_size=1024, layers=Layers(num_layers=4, hidden_size=256, ffn_size=512, num_heads=4, norm="rms"))
MODEL = Model(name="Org/Small VL", text=DECODER)
WORKLOAD = Workload(global_batch_size=64, seq_length=2048, image_tokens_per_sample=512, images_per_sample=2)
COMMAND = "python pretrain_vlm.py --auto-parallel-mm"
MANIFEST = make_manifest(MODEL, WORKLOAD, "cpu-xeon", {"torch": "2.13.0+cpu"}, COMMAND)
TIMING = Timing(median_ms=1.0, mad_ms=0.1, num_samples=9)
ENTRY = ProfileEntry(
    kind="text_layer",
    tp=1,
    mbs=1,
    tokens=2048,
    forward_ms=TIMING,
    backward_input_ms=TIMING,
    backward_weight_ms=TIMING,
    activation_bytes=4000,
    checkpoint_bytes=400,
    transient_bytes=2000,
)


class Sizes(NamedTuple):
    """A configuration, as profilers and hooks have their own."""

    tp: int
    cp: int
    mbs: int


def test_a_folder_for_every_device_and_model(tmp_path: Path) -> None:
    folder = profile_folder(tmp_path, "CPU Xeon (R)", MODEL)
    assert folder.parent == tmp_path / "cpu-xeon-r"
    assert folder.name.startswith("org-small-vl-")
    frozen = MODEL.with_freeze({"text": True})
    assert profile_folder(tmp_path, "cpu", frozen) != profile_folder(tmp_path, "cpu", MODEL)
    hidden = MODEL.model_copy(update={"name": "../..//"})
    assert profile_folder(tmp_path, "..", hidden).resolve().is_relative_to(tmp_path.resolve() / "unnamed")


def test_a_file_for_every_configuration() -> None:
    assert file_name(2, 1, 4, WORKLOAD) == "tp2-cp1-mbs4-seq2048-image512x2.json"
    assert file_name(1, 1, 1, Workload(global_batch_size=1, seq_length=64)) == "tp1-cp1-mbs1-seq64.json"
    changes = [
        {"seq_length": 4096},
        {"image_tokens_per_sample": 1024},
        {"images_per_sample": 4},
        {"audio_tokens_per_sample": 8},
        {"weight_bytes": 4.0},
        {"gradient_bytes": 2.0},
        {"optimizer_bytes": 8.0},
        {"attention": "unfused"},
    ]
    names = {file_name(1, 1, 1, WORKLOAD.model_copy(update=change)) for change in [{}, *changes]}
    assert len(names) == 1 + len(changes)
    assert file_name(1, 1, 1, WORKLOAD.model_copy(update={"global_batch_size": 8})) == file_name(1, 1, 1, WORKLOAD)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "p.json"
    full = ENTRY.model_copy(
        update={
            "recompute_ms": TIMING,
            "optimizer_ms": TIMING,
            "parameter_count": 77,
            "output_bytes": 88,
            "arrangement": "shard",
        }
    )
    overfull = ProfileEntry(kind="text_post", tp=1, mbs=1, tokens=2048, out_of_memory=True)
    write_profile(path, MANIFEST, [full, overfull])
    assert read_profile(path).entries == (full, overfull)
    document = json.loads(path.read_text())
    assert document["command"] == COMMAND
    assert document["workload"]["image_tokens_per_sample"] == 512
    assert "out_of_memory" not in document["entries"][0]
    assert "forward_ms" not in document["entries"][1]
    (found,) = read_profile_files([tmp_path / "new" / "folders"], MODEL, "cpu-xeon", WORKLOAD)
    assert Manifest(**{name: getattr(found[1], name) for name in Manifest.model_fields}) == MANIFEST


def test_only_what_has_no_file_is_missing(tmp_path: Path) -> None:
    wanted = [Sizes(1, 1, 1), Sizes(1, 1, 2), Sizes(2, 1, 1)]
    assert missing_configurations(tmp_path / "absent", MANIFEST, wanted, WORKLOAD) == wanted
    write_profile(tmp_path / file_name(1, 1, 2, WORKLOAD), MANIFEST, [ENTRY])
    assert missing_configurations(tmp_path, MANIFEST, wanted, WORKLOAD) == [wanted[0], wanted[2]]
    other = WORKLOAD.model_copy(update={"seq_length": 4096})
    assert missing_configurations(tmp_path, MANIFEST, wanted, other) == wanted


def test_half_a_file_is_no_configuration(tmp_path: Path) -> None:
    """A file cut short by other means than this program's is refused, not measured over and not believed."""
    path = tmp_path / file_name(1, 1, 1, WORKLOAD)
    write_profile(path, MANIFEST, [ENTRY])
    path.write_text(path.read_text()[:100])
    with pytest.raises(ProfileError, match=rf"profile file {path}: it is no valid JSON"):
        missing_configurations(tmp_path, MANIFEST, [Sizes(1, 1, 1)], WORKLOAD)


class TestFreshness:
    def check(self, **changed: object) -> None:
        check_fresh(Path("p.json"), MANIFEST, MANIFEST.model_copy(update=changed))

    def test_the_same_and_a_patch_release_hold(self) -> None:
        self.check()
        self.check(software={"torch": "2.13.1"}, date="2030-01-01", command="another")
        self.check(software={"numpy": "2.0"})

    @pytest.mark.parametrize("version", ["2.12.0", "2.14.0+cpu", "3.13.0", "2.1"])
    def test_another_release_of_torch_is_stale(self, version: str) -> None:
        with pytest.raises(ProfileError, match=r"p\.json: it was measured with torch 2\.13\.0\+cpu, and this") as told:
            self.check(software={"torch": version}, command="python now.py")
        assert "`python now.py`" in str(told.value)

    def test_another_device_is_foreign(self) -> None:
        with pytest.raises(ProfileError, match="it was measured on cpu-xeon, and this is h200-141g"):
            self.check(device="h200-141g")

    def test_another_model_is_foreign(self) -> None:
        model = MODEL.with_freeze({"text": True})
        with pytest.raises(ProfileError, match=r"of the model Org/Small VL .* other sizes or frozen parts"):
            self.check(model=make_manifest(model, WORKLOAD, "cpu", {}, "x").model)

    def test_a_stale_file_is_not_passed_over(self, tmp_path: Path) -> None:
        write_profile(tmp_path / file_name(1, 1, 1, WORKLOAD), MANIFEST, [ENTRY])
        now = MANIFEST.model_copy(update={"software": {"torch": "2.14.0"}})
        with pytest.raises(ProfileError, match=rf"remove it and renew it with `{COMMAND}`"):
            missing_configurations(tmp_path, now, [Sizes(1, 1, 1)], WORKLOAD)


class TestStrays:
    def test_only_old_temporary_files_go(self, tmp_path: Path) -> None:
        old, fresh = tmp_path / ".p.json.1.0123abcd.tmp", tmp_path / ".p.json.2.0123abcd.tmp"
        kept = [fresh, tmp_path / "p.json", tmp_path / ".of_another_program.tmp", tmp_path / ".p.json.1.notours!.tmp"]
        for path in (old, *kept):
            path.write_text("{")
        for path in (old, *kept[1:]):
            os.utime(path, (0, 0))
        clear_strays(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted(kept)
        assert STRAY_S > 60

    def test_they_are_no_profiles(self, tmp_path: Path) -> None:
        write_profile(tmp_path / "p.json", MANIFEST, [ENTRY])
        (tmp_path / ".q.json.1.0123abcd.tmp").write_text("{")
        assert len(read_profile_files([tmp_path], MODEL, "cpu-xeon")) == 1


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ProfileError, match=rf"profile file {blocked}/p\.json cannot be written \(.*\); make room"):
        write_profile(blocked / "p.json", MANIFEST, [ENTRY])


def test_and_before_anything_is_measured(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ProfileError, match=rf"profile folder {blocked}/a/b cannot be written \({blocked} is a file\)"):
        missing_configurations(blocked / "a" / "b", MANIFEST, [Sizes(1, 1, 1)], WORKLOAD)
    assert missing_configurations(tmp_path / "new" / "folder", MANIFEST, [Sizes(1, 1, 1)], WORKLOAD)
    assert list(tmp_path.iterdir()) == [blocked]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ProfileError, match=f"no permission in {tmp_path}"):
        missing_configurations(tmp_path, MANIFEST, [Sizes(1, 1, 1)], WORKLOAD)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.profiles.disk import write_measurements
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_measurements(Path(sys.argv[1]), {"text": "x" * 1000})
except ProfileError as failure:
    print(failure)
"""


def test_a_disk_that_takes_no_more_keeps_what_was_there(tmp_path: Path) -> None:
    """The system ends the write in its middle, as a full disk does."""
    path = tmp_path / "p.json"
    write_profile(path, MANIFEST, [ENTRY])
    told = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"profile file {path} cannot be written (File too large)" in told.stdout
    assert "the same command continues after it" in told.stdout
    assert read_profile(path).entries == (ENTRY,)
    assert list(tmp_path.iterdir()) == [path]


def write_from(command: str) -> str:
    return f"""
import sys
from pathlib import Path
from mm_autoparallel.model.profiles.store import read_profile, write_profile
path = Path(sys.argv[1])
profile = read_profile(path)
for _ in range(int(sys.argv[2])):
    write_profile(path, profile.model_copy(update={{"command": {command!r}}}), profile.entries)
    assert len(read_profile(path).entries) == 1
"""


def test_two_runs_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, MANIFEST, [ENTRY])
    runs = [subprocess.Popen([sys.executable, "-c", write_from(name), str(path), "40"]) for name in ("one", "other")]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    assert read_profile(path).command in ("one", "other")
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_run_leaves_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, MANIFEST, [ENTRY])
    with subprocess.Popen([sys.executable, "-c", write_from("one"), str(path), "1000000"]) as run:
        while read_profile(path).command != "one":
            time.sleep(0.01)
        run.kill()
    assert read_profile(path).entries == (ENTRY,)
    assert missing_configurations(tmp_path, MANIFEST, [Sizes(1, 1, 1)], WORKLOAD) == [Sizes(1, 1, 1)]
