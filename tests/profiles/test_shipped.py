"""The folder subgraph_profiles: what is shipped in it, whose it is, and that one's own files win."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.costs.stage import describe_provenance
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles import shipped
from mm_autoparallel.model.profiles.operators.base import OperatorBase, base_path
from mm_autoparallel.model.profiles.operators.times import OperatorTimes
from mm_autoparallel.model.profiles.store import hash_model, read_profile
from mm_autoparallel.model.profiles.traced import OPERATOR_COLUMNS, is_shipped, read_trace, read_traces
from mm_autoparallel.model.readers.job_file import read_job

LARGEST_BYTES = 10_000_000

DIVIDED = {
    "deepseek_v3/job.yaml": {1, 2},
    "internvl2_76b/job.yaml": {1},
    "llava_1_5_7b/job.yaml": {1, 2, 4, 8},
    "mixed_cluster/job.yaml": {1, 2, 4, 8},
    "moonlight_16b/job.yaml": {1, 2, 4, 8},
    "published_gains/internvl2_76b.yaml": {1},
    "published_gains/internvl2_8b.yaml": {1},
    "qwen25_omni_7b/job.yaml": {1, 2, 4},
    "qwen2vl_72b/job.yaml": {1, 2, 4, 8},
    "qwen2vl_72b_h200/job.yaml": {1, 2, 4, 8},
    "qwen2vl_7b_h200/job.yaml": {1, 2, 4},
    "qwen3vl_30b_a3b/job.yaml": {1, 2, 4},
    "three_level_network/job.yaml": {1, 2, 4, 8},
}
"""Tensor parallel sizes of the traces: all lawful ones up to 8."""

LACKING = {"deepseek_v3/job.yaml": {"text_mtp"}}
"""Kinds of blocks that the classes of transformers do not have."""


def shipped_files(repository: Path) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "subgraph_profiles"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    return [repository / name for name in listed.stdout.splitlines()]


def test_the_folder_stays_small(repository: Path) -> None:
    files = shipped_files(repository)
    assert len(files) > 80
    assert sum(path.stat().st_size for path in files) <= LARGEST_BYTES


def test_every_model_of_the_examples_has_its_traces(repository: Path) -> None:
    examples = repository / "examples"
    jobs = [*examples.glob("*/job*.yaml"), *examples.glob("published_gains/*.yaml")]
    models = {hash_model(read_job(path).model) for path in jobs}
    assert models == {hash_model(read_job(examples / name).model) for name in DIVIDED}


@pytest.mark.parametrize("name", DIVIDED)
def test_traces_hold_every_kind_at_every_lawful_size(repository: Path, name: str) -> None:
    job = read_job(repository / "examples" / name)
    traces = [trace for _, trace in read_traces([Path("traced")], job.model, job.workload)]
    assert {entry.tp for trace in traces for entry in trace.entries} == DIVIDED[name]
    exact = [trace for trace in traces if trace.workload.seq_length == job.workload.seq_length]
    sizes = {(trace.entries[0].tp, trace.entries[0].mbs) for trace in exact}
    assert sizes == {(tp, mbs) for tp in DIVIDED[name] for mbs in job.search.mbs or (1, 2, 4)}
    kinds = {block.kind for block in expand(job.model).blocks} - LACKING.get(name, set())
    assert all({entry.kind for entry in trace.entries} == kinds for trace in exact)


def test_their_command_is_one_that_a_reader_can_type(repository: Path) -> None:
    for path in (repository / "subgraph_profiles/shipped/traced").glob("*/*.json"):
        head = path.read_text(encoding="utf-8").splitlines()[0]
        origin = json.loads(head + "]}")
        command = origin["command"].split()
        assert command[:2] == ["mm-autoparallel", "trace"]
        named = [word for word in command if "/" in word]
        assert named
        assert all((repository / word).exists() and not Path(word).is_absolute() for word in named), path
        assert set(origin["software"]) == {"torch", "transformers"}


def test_the_operator_base_is_of_the_profiled_device(repository: Path) -> None:
    store = repository / "subgraph_profiles/shipped"
    (folder,) = store.glob("cpu-*")
    (profile, *_) = folder.glob("*/tp1-*.json")
    with OperatorBase.open(base_path(store)) as base:
        assert OperatorTimes.of(base, folder.name, read_profile(profile).software) is not None
        assert OperatorTimes.of(base, "another", read_profile(profile).software) is None


def test_they_are_asked_for_by_name_unless_it_is_a_folder(tmp_path: Path) -> None:
    assert is_shipped(tmp_path / "traced")
    (tmp_path / "traced").mkdir()
    assert not is_shipped(tmp_path / "traced")


def test_ones_own_traces_win_file_by_file(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = read_job(repository / "examples/mixed_cluster/job.yaml")
    first = next((repository / "subgraph_profiles/shipped/traced").glob("own-llm-13b-*/tp1-cp1-mbs1-*"))
    document = json.loads(first.read_text(encoding="utf-8"))
    for entry in document["entries"]:
        entry["activation_bytes"] += 1
    own = tmp_path / "subgraph_profiles/traced" / first.parent.name / first.name
    own.parent.mkdir(parents=True)
    own.write_text(json.dumps(document), encoding="utf-8")

    monkeypatch.chdir(tmp_path)
    traces = read_traces([Path("traced")], job.model, job.workload)
    assert len(traces) == len(list(first.parent.glob("*.json")))
    (mine,) = [trace for path, trace in traces if path == own.relative_to(tmp_path)]
    assert mine.entries[0].activation_bytes == read_trace(first).entries[0].activation_bytes + 1
    assert all(str(path).startswith("subgraph_profiles/shipped/") for path, _ in traces[1:])


def test_plans_say_which_they_used(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # wherever one stands, they are called alike
    job = read_job(repository / "examples/qwen2vl_72b/job.yaml")
    asked = type(job)(**(vars(job) | {"profiles": (job.path.parent / "traced",)}))
    for strategy in (Strategy(pp=4, tp=8, dp=4, mbs=1), Strategy(pp=4, tp=4, cp=2, dp=4, mbs=1)):
        found = describe_provenance(asked, strategy)
        assert {name.rsplit("-", 1)[0] for name in map(str, {Path(one).parent for one in found["profiles"]})} == {
            "subgraph_profiles/shipped/traced/qwen2vl-72b"
        }
        assert {block["memory"] for block in found["blocks"].values()} == {"traced"}


def test_a_model_that_is_not_among_them_is_told_those_that_are(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = read_job(repository / "examples/mixed_cluster/job.yaml")
    model = job.model.model_copy(update={"text": job.model.text.model_copy(update={"vocab_size": 32001})})
    with pytest.raises(ProfileError, match=r"which are of .*qwen2.*none with the sizes .* of own-llm-13b .*trace JOB"):
        read_traces([Path("traced")], model, job.workload)
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "elsewhere" / "package")
    with pytest.raises(ProfileError, match="which are of none"):
        read_traces([Path("traced")], model, job.workload)


def test_an_installed_package_has_them_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "mm_autoparallel"
    within = package / "subgraph_profiles" / "traced" / "some-model-00000000"
    within.mkdir(parents=True)
    monkeypatch.setattr(shipped, "_PACKAGE", package)
    assert shipped.shipped_store() == package / "subgraph_profiles"
    assert shipped.shipped_models() == ("some-model-00000000",)
    monkeypatch.chdir(tmp_path)
    assert shipped.shipped_store() == Path("site-packages/mm_autoparallel/subgraph_profiles")


def test_every_operator_says_how_it_was_called(repository: Path) -> None:
    """All but collectives, whose sizes say it."""
    for path in (repository / "subgraph_profiles/shipped/traced").glob("*/*.json"):
        rows = [row for entry in json.loads(path.read_text())["entries"] for row in entry["operators"]]
        bare = {row[1] for row in rows if row[2] != "collective" and len(row) == len(OPERATOR_COLUMNS)}
        assert (path, bare) == (path, set())


def test_divided_sequences_are_handed_on_in_parts(repository: Path) -> None:
    """What a stem hands on at TP N is an Nth of the whole, where sequences are divided."""
    whole: dict[tuple[str, str, int], set[int]] = {}
    for path in (repository / "subgraph_profiles/shipped/traced").glob("*/*.json"):
        for entry in json.loads(path.read_text())["entries"]:
            if entry["kind"].endswith("_pre"):
                parts = entry["tp"] if entry["sequence_parallel"] else 1
                key = (path.parent.name, entry["kind"], entry["mbs"])
                whole.setdefault(key, set()).add(parts * entry["output_bytes"])
    assert len(whole) > 30
    assert {key: sizes for key, sizes in whole.items() if len(sizes) > 1} == {}
