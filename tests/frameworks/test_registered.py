"""Frameworks that distributions register by an entry point: found, asked, and left out where they are broken."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mm_autoparallel.api import doctor
from mm_autoparallel.cli.main import main
from mm_autoparallel.cli.parser import VERBS
from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.catalog import find_launch, frameworks, is_built_live, live_models_of
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers import registry
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.planner.plan import RESULT_FILE

OWN = {
    *(
        "accelerate",
        "auto-tuning",
        "colossalai",
        "deepspeed",
        "galvatron",
        "huggingface",
        "megatron-bridge",
        "megatron-core",
        "mindformers",
        "mindspeed-mm",
        "mindspeed-llm",
    ),
    *("mindspeed-mm-fsdp", "paddle", "tinker", "torch", "torchtitan"),
}
CONFIG = Path(__file__).parents[1] / "fixtures" / "huggingface" / "llava_1_5_7b.json"
TINY = {"tiny_trainer": 1, "depth": 4, "width": 512, "heads": 8, "words": 32000}
FLAGS = ["--nodes", "1", "--nproc-per-node", "2", "--device", "h200-141g", "--gbs", "4", "--seq", "256"]

LAUNCHES = """
import json
from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.described import Described
from mm_autoparallel.integrations.export import Export, write_files
from mm_autoparallel.integrations.framework import Framework, LaunchKind

def describe(path, given):
    said = json.loads(path.read_text())
    workload = {"global_batch_size": said["batch"], "seq_length": said["length"]}
    return Described(path.parent / said["model"], workload, {"mbs": (1,)})

def read_plan(path, given):
    raise PlanError("it names none")

def write_plan(plan, path, out, given, overwrite):
    text = json.dumps({**json.loads(path.read_text()), "pp": plan.strategy.pp, "dp": plan.strategy.dp})
    write_files({out / path.name: text}, overwrite)
    return Export((out / path.name,), ())

KIND = LaunchKind("a launch of TinyTrainer (.launch)", lambda path: path.suffix == ".launch", lambda path: (1, 2),
                  describe, read_plan, lambda path, out, given: (out / path.name,), write_plan)
"""
ONE = "from mm_autoparallel.integrations.framework import Framework\n"
FORM = "from mm_autoparallel.model.readers.model_form import ModelForm\n"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution on the path: (its name, entry points as their file has them, module → source)."""
    before = {*sys.modules}
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def put(name: str, entries: str, **modules: str) -> None:
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{entries}\n")
        for module, source in modules.items():
            folder = site / module
            folder.mkdir()
            (folder / "__init__.py").touch()
            (folder / "framework.py").write_text(source)
        registry.forget()

    yield put
    registry.forget()
    for module in {*sys.modules} - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(site)):
            del sys.modules[module]


def recipe(repository: Path, language: str) -> str:
    """The block of that language in the recipe."""
    text = (repository / "docs" / "contributing" / "recipes.md").read_text()
    (block,) = re.findall(rf"^ +```{language}\n(.*?)^ +```", text.partition("## Add a framework")[2], re.S | re.M)
    return "".join(line.removeprefix("    ") for line in block.splitlines(keepends=True))


# ------------------------------------------------------------------------------------------------------- this package's


def test_each_folder_has_its_entry_point(repository: Path, package: Path) -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    folders = {path.parent.name for path in (package / "integrations").glob("*/framework.py")}
    assert project["entry-points"][registry.GROUP] == {
        name.replace("_", "-"): f"mm_autoparallel.integrations.{name}.framework:FRAMEWORK" for name in folders
    }
    assert {name.replace("_", "-") for name in folders} == OWN


def test_they_are_found_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "distributions", lambda path: ())
    registry.forget()
    assert frameworks().keys() == OWN
    assert read_model(CONFIG).name == "llava-llava_1_5_7b"


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    probe = (
        "import sys\nfrom mm_autoparallel.cli.main import main\nmain(['plan', '--help'])\nimport mm_autoparallel\n"
        "print([n for n in sys.modules if '.integrations' in n or '.readers' in n], file=sys.stderr)\n"
        "from mm_autoparallel.model.readers.registry import list_frameworks\nlist_frameworks()\n"
        "print([n for n in sys.modules if '.integrations.' in n and n.count('.') == 3], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    before, after = done.stderr.splitlines()
    assert before == "[]"
    assert sorted(json.loads(after.replace("'", '"'))) == [
        f"mm_autoparallel.integrations.{name.replace('-', '_')}.framework" for name in sorted(OWN)
    ]


def test_verbs_that_frameworks_name_are_verbs() -> None:
    named = [verb for framework in frameworks().values() for verb in framework.verbs]
    galvatron = ["galvatron-search", "galvatron-score", "galvatron-profiles"]
    assert named == [*galvatron, "nd-search", "pipeline-search", "rank", "tinker"]
    assert {*named} <= {*VERBS}


# ---------------------------------------------------------------------------------------------------- others' that work


def test_the_recipe_makes_a_model_that_is_planned(
    install: Install,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entries = recipe(repository, "toml").splitlines()
    assert entries[0] == f'[project.entry-points."{registry.GROUP}"]'
    install("tiny-trainer", entries[1].replace('"', ""), tiny_trainer=recipe(repository, "python"))
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(TINY))
    assert main(["plan", "--model", "tiny.json", *FLAGS, "--time-limit", "20"]) == 0
    assert json.loads(Path(RESULT_FILE).read_text())["e2e_time"] > 0
    model = read_model(Path("tiny.json"))
    assert (model.name, model.text.layers.num_layers, model.text.layers.ffn_size) == ("tiny-tiny", 4, 2048)
    Path("tiny.json").write_text(json.dumps(TINY | {"width": "wide"}))
    capsys.readouterr()
    assert main(["plan", "--model", "tiny.json", *FLAGS]) == 2
    assert 'tiny.json: width is "wide"; a whole number, at least 1, is expected' in capsys.readouterr().err


def test_its_launch_is_planned(
    install: Install,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = f"{recipe(repository, 'python')}{LAUNCHES}FRAMEWORK = Framework('TinyTrainer', models, lambda: [KIND])"
    install("tiny-trainer", "tiny-trainer = tiny_trainer.framework:FRAMEWORK", tiny_trainer=source)
    assert {*frameworks()} == OWN | {"tiny-trainer"}
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(TINY))
    Path("run.launch").write_text(json.dumps({"model": "tiny.json", "batch": 4, "length": 256}))
    assert main(["plan", "--script", "run.launch", "--device", "h200-141g", "--time-limit", "20"]) == 0
    written = json.loads(Path("planned/run.launch").read_text())
    assert (written["model"], written["pp"] * written["dp"]) == ("tiny.json", 2)
    assert read_job(Path("planned/job.json")).cluster.num_devices == 2
    assert "the script's own plan: it names none" in capsys.readouterr().out
    Path("notes.txt").touch()
    with pytest.raises(JobError, match=r"known are a launch of TinyTrainer \(.launch\), .*FSDP trainer"):
        find_launch(Path("notes.txt"))


def test_its_live_models_are_built(install: Install, repository: Path, tmp_path: Path) -> None:
    give = "from mm_autoparallel.integrations.framework import LiveModels\nfrom functools import partial\n"
    live = "LiveModels(lambda content, *_: content['depth'], lambda content, workload, length: length, str)"
    source = f"{recipe(repository, 'python')}{give}FRAMEWORK = partial(Framework, 'TinyTrainer', models)"
    install("tiny-a", "tiny = tiny_a.framework:FRAMEWORK", tiny_a=f"{source}(live_models=lambda: {live})")
    assert is_built_live(TINY, "tiny.json")
    assert live_models_of(TINY, "tiny.json").make_subject(TINY, None, None, None) == 4  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "site" / "tiny-a-1.0.dist-info")
    install("tiny-b", "tiny = tiny_b.framework:FRAMEWORK", tiny_b=f"{source}(live_models=lambda: 7)")
    with pytest.raises(JobError, match=r"framework tiny \(distribution tiny-b\) builds live models by 7, and Live"):
        live_models_of(TINY, "tiny.json")


def test_a_form_of_its_own_is_asked_before_hugging_face(install: Install, repository: Path, tmp_path: Path) -> None:
    install("tiny-trainer", "tiny = tiny_trainer.framework:FRAMEWORK", tiny_trainer=recipe(repository, "python"))
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "llama"}))
    assert read_model(tmp_path / "config.json").name == "tiny-config"
    assert read_model(CONFIG).name == "llava-llava_1_5_7b"


# ---------------------------------------------------------------------------------------------- others' that are broken

CLAIMS_ALL = f"{ONE}{FORM}FRAMEWORK = Framework('All', models=lambda: [ModelForm('all', lambda _: True, lambda _: 1)])"
BROKEN = {
    "import": ("nowhere = {m}.framework:FRAMEWORK", "import nothing_so_called", "cannot be imported (ModuleNotFound"),
    "exit": ("leaves = {m}.framework:FRAMEWORK", "raise SystemExit(3)", "cannot be imported (SystemExit: 3)"),
    "attribute": ("none = {m}.framework:ABSENT", ONE, "cannot be imported (AttributeError"),
    "object": ("number = {m}.framework:FRAMEWORK", "FRAMEWORK = 3", "which is 3, and a Framework is expected"),
    "own name": ("huggingface = {m}.framework:FRAMEWORK", CLAIMS_ALL, "a name that mm-autoparallel itself has"),
    "twice": ("one = {m}.framework:A\none = {m}.framework:B", ONE, "register the framework one more than once"),
    "malformed": ("one", ONE, "has metadata that cannot be read"),
    "provider": (
        "late = {m}.framework:FRAMEWORK",
        f"{ONE}def models():\n    import nothing_so_called\nFRAMEWORK = Framework('Late', models=models)",
        "whose models cannot be told (ModuleNotFoundError",
    ),
    "form": (
        "wrong = {m}.framework:FRAMEWORK",
        f"{ONE}FRAMEWORK = Framework('Wrong', models=lambda: [7])",
        "whose models hold 7, and a ModelForm is expected",
    ),
    "is_one": (
        "curious = {m}.framework:FRAMEWORK",
        f"{ONE}{FORM}FRAMEWORK = Framework('C', models=lambda: [ModelForm('c', lambda d: d['c']['d'], lambda _: 1)])",
        "which fails on a file of others (KeyError: 'c')",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_one_is_named_and_hinders_nobody(
    kind: str,
    install: Install,
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    told_on_terminal: None,
) -> None:
    entries, source, words = BROKEN[kind]
    install("Broken_One", entries.format(m="broken_one"), broken_one=source)
    install("tiny-trainer", "tiny = tiny_trainer.framework:FRAMEWORK", tiny_trainer=recipe(repository, "python"))
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    for _ in range(2):
        assert read_model(tmp_path / "tiny.json").name == "tiny-tiny"
        assert isinstance(read_model(CONFIG), Model)
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert told.startswith("mm-autoparallel: warning: distribution ")
    assert words in told
    assert ("Broken_One" in told) is (kind != "malformed")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(JobError, match=r"none.json: it is no model that is understood.*Not asked: distribution"):
        read_model(tmp_path / "none.json")


def test_two_that_claim_a_file_are_both_named(install: Install, repository: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        install(
            f"tiny-{name}",
            f"{name} = tiny_{name}.framework:FRAMEWORK",
            **{f"tiny_{name}": recipe(repository, "python")},
        )
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    with pytest.raises(JobError, match=r"tiny.json is taken .* first \(distribution tiny-first\) and second \(distrib"):
        read_model(tmp_path / "tiny.json")
    assert read_model(CONFIG).name == "llava-llava_1_5_7b"


def test_one_that_cannot_read_a_file_leaves_it_to_others(install: Install) -> None:
    refusing = (
        f"{ONE}{FORM}from mm_autoparallel.errors import JobError\n"
        "def is_one(content):\n    raise JobError('none of mine')\n"
        "FRAMEWORK = Framework('R', models=lambda: [ModelForm('r', is_one, lambda _: 1)])"
    )
    install("refusing", "refusing = refuses_all.framework:FRAMEWORK", refuses_all=refusing)
    assert read_model(CONFIG).name == "llava-llava_1_5_7b"
    assert registry.list_broken() == ()


@pytest.mark.parametrize("on_path", ["", "."])
def test_nothing_is_registered_by_the_current_folder(
    on_path: str, install: Install, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("tiny-trainer", "tiny = tiny_trainer.framework:FRAMEWORK", tiny_trainer=recipe(repository, "python"))
    monkeypatch.setattr(sys, "path", [on_path, *sys.path])
    monkeypatch.chdir(tmp_path / "site")
    registry.forget()
    assert {*frameworks()} == OWN


def test_what_it_reads_must_be_a_model(install: Install) -> None:
    install("all", "all = takes_all.framework:FRAMEWORK", takes_all=CLAIMS_ALL)
    with pytest.raises(JobError, match=r"framework all \(distribution all\) reads it as 1, and a Model is expected"):
        read_model(CONFIG)


def test_a_distribution_that_is_there_twice_counts_once(install: Install, repository: Path, tmp_path: Path) -> None:
    entry = "tiny = tiny_trainer.framework:FRAMEWORK"
    install("tiny-trainer", entry, tiny_trainer=recipe(repository, "python"))
    install("Tiny_Trainer", entry)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    assert read_model(tmp_path / "tiny.json").name == "tiny-tiny"
    assert registry.list_broken() == ()


def test_doctor_lists_them_and_names_broken_ones(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    good = ONE + "FRAMEWORK = Framework('Good')\n"
    torn = ONE + "def models():\n    raise RuntimeError('torn')\n\nFRAMEWORK = Framework('Torn', models=models)\n"
    install("good-trainer", "good = good.framework:FRAMEWORK", good=good)
    install("torn-trainer", "torn = torn.framework:FRAMEWORK", torn=torn)
    install("lost-trainer", "lost = lost.framework:FRAMEWORK")
    for name in ("_compile", "_plan", "_place", "_try_torch"):
        monkeypatch.setattr(doctor, name, lambda: "fine")
    diagnosis = doctor.diagnose()
    (listed,) = [check for check in diagnosis.checks if check.name == "frameworks"]
    assert listed.status == "works"
    assert set(listed.found.split(", ")) == OWN | {
        "good (distribution good-trainer)",
        "torn (distribution torn-trainer)",
    }
    broken = sorted(check.found for check in diagnosis.checks if check.status == "broken")
    assert [sentence.split()[1] for sentence in broken] == ["lost-trainer", "torn-trainer"]
    assert "cannot be imported (ModuleNotFoundError" in broken[0]
    assert "whose models cannot be told (RuntimeError: torn)" in broken[1]
    assert not diagnosis.works
