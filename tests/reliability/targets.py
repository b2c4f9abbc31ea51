"""What is attacked: for each kind of input the files that are right, and the command or function that reads them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutate import NUMBERS, TEXTS
from right_inputs import (
    DECODER,
    JOB,
    LOG,
    MEGATRON,
    MEMORY,
    PLAN,
    PROBLEM,
    RANK_HEADER,
    RECIPE,
    SAPP_INIT,
    SAPP_LAYERS,
    SCRIPT,
)

from mm_autoparallel.cli.main import main
from mm_autoparallel.reports.page.html import pack_report
from mm_autoparallel.studio.actions import act, read_request
from mm_autoparallel.studio.document import Do
from mm_autoparallel.studio.session import Session

ROOT = Path(__file__).parents[2]
EXAMPLES, FIXTURES, TABLES = (
    ROOT / "examples",
    ROOT / "tests" / "fixtures",
    ROOT / "examples" / "published_measurements",
)


@dataclass(frozen=True)
class Target:
    """prepare: writes what is right into a folder. run: reads it there; its exit code. edits: what it may change."""

    prepare: Callable[[Path], None]
    run: Callable[[random.Random], int]
    edits: frozenset[str] = field(default=frozenset())
    mutates: str = ""
    """Files whose path matches; all where empty."""


def _dump(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def _job(folder: Path, **changes: Any) -> None:
    _dump(folder / "job.json", JOB | changes)


def _command(*arguments: str) -> Callable[[random.Random], int]:
    return lambda rng: main(arguments)


def _with_model(name: str, source: Path | dict[str, Any], **changes: Any) -> Callable[[Path], None]:
    """A job of the model in `source`, and a plan that has its layers."""

    def prepare(folder: Path) -> None:
        document = source if isinstance(source, dict) else json.loads(source.read_text(encoding="utf-8"))
        _dump(folder / name, document)
        cluster = {"num_nodes": 2, "devices_per_node": 4, "device": "b200-192g"}
        _job(folder, model=name, cluster=cluster, search={"pp": [2], "tp": [2], "mbs": [1]}, **changes)

    return prepare


def _simulated(folder: Path) -> None:
    (folder / "job.yaml").write_text(_yaml(JOB), encoding="utf-8")
    _dump(folder / "plan.json", PLAN)


def _yaml(document: Any) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False)


def _problem(folder: Path) -> None:
    _dump(folder / "problem.json", PROBLEM)


def _certificate(folder: Path) -> None:
    _problem(folder)
    assert main(["place", "problem.json", "--certificate", "certificate.json", "--json"]) == 0
    (folder / "problem.json").unlink()


def _calibrated(folder: Path) -> None:
    import mm_autoparallel.model.profiles.calibration as calibration

    _job(folder, calibration="mine.json")
    _dump(folder / "plan.json", PLAN)
    document = json.loads((calibration.SHIPPED / "a100-80g.json").read_text(encoding="utf-8"))
    document["fitted"] = document["fitted"][:1]
    document["held_out"] = {}
    _dump(folder / "mine.json", document)


def _tables(folder: Path) -> None:
    for path in sorted(TABLES.glob("*.csv")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / path.name).write_text("".join(lines[:4]), encoding="utf-8")
    row = "llama3-70b,12,b200-192g,32,4096,2,1,4,1,1476.8,0:71e9;1:64e9,6;6,None\n"
    (folder / "neutral.csv").write_text(
        "model,num_layers,device,global_batch_size,seq_length,pp,tp,dp,mbs,measured_ms,measured_bytes,layers_per_stage,"
        f"note\n{row}{row.replace('1476.8', '')}",
        encoding="utf-8",
    )
    _job(folder)
    _dump(folder / "plan.json", PLAN)
    (folder / "runs.csv").write_text(
        "job,plan,measured_ms,measured_bytes,out_of_memory\njob.json,plan.json,80.5,3e9,\njob.json,plan.json,,,true\n"
    )


def _validate(rng: random.Random) -> int:
    return main(["validate", *rng.sample(sorted(path.name for path in Path().glob("*.csv")), 3), *_maybe_json(rng)])


def _maybe_json(rng: random.Random) -> list[str]:
    return rng.choice(([], ["--json"]))


def _calibrate_table(folder: Path) -> None:
    lines = (TABLES / "korthikanti2022.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "table.csv").write_text("".join(lines[:3]), encoding="utf-8")


def _pretrain(folder: Path, name: str = "pretrain.yaml") -> None:
    shutil.copy(FIXTURES / "mindformers" / "512_4k.yaml", folder / name)
    (folder / "memory.txt").write_text(MEMORY, encoding="utf-8")


def _nd_search(folder: Path) -> None:
    shutil.copy(EXAMPLES / "mindformers" / "pretrain_llama3_70b.yaml", folder / "pretrain.yaml")
    for name in ("DP8_TP8_PP1_EP1", "DP4_TP8_PP2_EP1"):
        (folder / "dry" / name).mkdir(parents=True)
        (folder / "dry" / name / "dryrun_new.log").write_text(LOG, encoding="utf-8")
    _dump(folder / "env.json", {"ASCEND": "1"})


def _rank(folder: Path) -> None:
    (folder / "yamls").mkdir()
    shutil.copy(EXAMPLES / "mindformers" / "pretrain_llama3_70b.yaml", folder / "yamls" / "one.yaml")
    text = (folder / "yamls" / "one.yaml").read_text(encoding="utf-8")
    sizes = [
        re.search(rf"{key}: (?:&\w+ )?(\d+)", text) for key in ("data_parallel", "model_parallel", "pipeline_stage")
    ]
    row = ",".join(size[1] for size in sizes if size)
    expert = re.search(r"expert_parallel: (?:&\w+ )?(\d+)", text)
    row += f",{expert[1] if expert else 1}"
    (folder / "profiles.csv").write_text(f"{RANK_HEADER}{row},1.0,2.0,0.9,1.5,3.0\n", encoding="utf-8")
    (folder / "nd.csv").write_text(f"dp,tp,pp,ep,peakMem\n{row},48874\n", encoding="utf-8")


def _timelines(folder: Path) -> None:
    text = (EXAMPLES / "mindformers" / "pretrain_deepseek3.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("pipeline_stage: 8", "pipeline_stage: 1"),
        ("&micro_batch_num 32", "&micro_batch_num 2"),
        ("&num_layers 29", "&num_layers 5"),
    ):
        text = text.replace(old, new)
    text = text.replace("recompute: True", "recompute: [4]", 1)
    (folder / "yamls").mkdir()
    (folder / "yamls" / "DP16_TP4_PP16_EP8_pretrain.yaml").write_text(text, encoding="utf-8")
    events, now = [], 0.0
    for kind in 2 * ["", "", "", "", "", "", "Grad", "Grad", *(4 * ["", "Grad"])]:
        now += (5000.0 if kind else 2000.0) + 20_000.0 * (len(events) % 20 == 6)
        events.append({"name": f"FlashAttentionScore{kind}", "ph": "X", "pid": 7, "tid": 2, "ts": f"{now:.3f}"})
    _dump(folder / "data" / "DP16_TP4_PP16_EP8" / "rank_0" / "trace_view.json", events)


def _read_timelines(rng: random.Random) -> int:
    from mm_autoparallel.integrations.mindformers.profile_traces import read_profiles

    return _call(lambda: read_profiles(Path("data"), Path("yamls")))


def _call(action: Callable[[], object]) -> int:
    """As the command line would end: what is wrong in one paragraph, and its exit code."""
    from mm_autoparallel.streams import write_output

    def act_and_tell() -> int:
        write_output(f"{action()}\n")
        return 0

    return _ends(act_and_tell)


def _ends(action: Callable[[], int]) -> int:
    from mm_autoparallel.errors import PlannerError
    from mm_autoparallel.streams import say

    try:
        return action()
    except PlannerError as error:
        say(str(error))
        return error.exit_code


def _cached(folder: Path) -> None:
    _job(folder)
    assert main(["plan", "job.json", "--cache", "cache", "--out", ".", "--json"]) == 0
    assert list((folder / "cache").rglob("*.json"))


def _profiled(folder: Path) -> None:
    from mm_autoparallel.model.profiles.store import hash_model
    from mm_autoparallel.model.readers.job_file import read_job

    _job(folder)
    timing = {"median_ms": 1.5, "mad_ms": 0.01, "num_samples": 20}
    entry = {
        "tp": 1, "mbs": 1, "forward_ms": timing, "backward_input_ms": timing, "backward_weight_ms": timing,
        "activation_bytes": 40_000_000, "checkpoint_bytes": 1_000_000, "transient_bytes": 2_000_000,
    }  # fmt: skip
    kinds = {"vision_layer": 1024, "text_layer": 1024}
    document = {
        "schema": "mm-autoparallel/profile/1",
        "model": {"name": "small", "sha256": hash_model(read_job(folder / "job.json").model)},
        "device": "a100-80g",
        "software": {"torch": "2.13.0"},
        "date": "2025-11-21",
        "command": "mm-autoparallel profile job.yaml",
        "entries": [entry | {"kind": kind, "tokens": tokens} for kind, tokens in kinds.items()],
    }
    _dump(folder / "store" / "profile.json", document)
    fit = {
        "operation": "all_reduce", "num_ranks": 2, "level": "node", "inside": 1, "latency_ms": 0.02,
        "bandwidth_bytes_per_s": 1e11, "residual_fraction": 0.01, "samples": [{"size_bytes": 1024, "time_ms": timing}],
    }  # fmt: skip
    origin = {key: document[key] for key in ("device", "software", "date", "command")}
    _dump(folder / "store" / "network.json", {"schema": "mm-autoparallel/network/1", "fits": [fit], **origin})
    _job(folder, profiles=["store"])
    _dump(folder / "plan.json", PLAN)


def _scripts(folder: Path) -> None:
    shutil.copy(FIXTURES / "mindspeed_mm_models" / "qwen2vl_2b.json", folder / "model.json")
    (folder / "train.sh").write_text(SCRIPT, encoding="utf-8")


def _write_script(rng: random.Random) -> int:
    from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
    from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back, write_plan
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.planner.plan import Plan

    def write_and_read() -> object:
        model = read_model_json(Path("model.json"))
        layers = {part.name: (1, part.layers.num_layers - 1) for part in model.modalities}
        layers |= {part.name: (part.layers.num_layers, 0) for part in model.modalities if part.name != "text"}
        plan = Plan(Strategy(pp=2, tp=2, dp=4, mbs=1), layers, dict.fromkeys(layers, (0, 0)), 64)
        written = write_plan(plan, Path("model.json"), Path("train.sh"), Path("out"))
        return read_plan_back(*written.files, world_size=16)

    return _call(write_and_read)


def _launch(folder: Path) -> None:
    """A script that its model.json is beside, and the data that say how large its images are."""
    _scripts(folder)
    text = (
        SCRIPT.replace("./examples/tiny/model.json", "./model.json") + "    --seq-length 1024 --mm-data ./data.json\n"
    )
    (folder / "train.sh").write_text(text.replace("$MM_MODEL\n ", "$MM_MODEL \\\n "), encoding="utf-8")
    _dump(folder / "data.json", {"dataset_param": {"preprocess_parameters": {"image_max_pixels": 200704}}})


def _trainer(folder: Path) -> None:
    """A launch of the FSDP trainer, in the place that its script names."""
    shutil.copytree(FIXTURES / "mindspeed_mm_fsdp", folder / "training")
    shutil.copy(FIXTURES / "huggingface" / "qwen3_vl_30b_a3b.json", folder / "config.json")


def _plan_script(script: str, *more: str) -> Callable[[random.Random], int]:
    flags = ("--device", "ascend-910b-64g", "--nnodes", "2", "--nproc-per-node", "8", "--time-limit", "2")
    return _command("plan", "--script", script, *flags, "--out", "out", *more)


_FROM_MEGATRON = ("train.sh", "--device", "h100-80g")
_TO_MEGATRON = ("plan.json", "--to", "megatron-core", "--job", "job.yaml", "--into", "train.sh")


def _megatron_script(folder: Path) -> None:
    """A launch script of Megatron-LM."""
    shutil.copy(EXAMPLES / "megatron_core" / "train_8b.sh", folder / "train.sh")


def _megatron_export(folder: Path) -> None:
    """The same, the job that it is, and a plan to be written into it."""
    _megatron_script(folder)
    assert _in(folder, lambda: main(["import", *_FROM_MEGATRON, "--out", "."])) == 0


def _galvatron(folder: Path) -> None:
    """Its example, and a strategy of it."""
    shutil.copytree(EXAMPLES / "galvatron", folder, dirs_exist_ok=True)
    (folder / "README.md").unlink()
    for path in (folder / "profiles").glob("*_2nodes_*"):
        path.unlink()
    assert _in(folder, lambda: main(["galvatron-search", "search.yaml", "--out", "strategy.json"])) == 0


_PADDLE_FILES = {"time_profile_data": "comp", "memory_profile_data": "mem", "overlap_coe": "ov", "allreduce_coe": "ar"}
_PADDLE_FLAGS = (
    *("--paddle", "--p2p_coe_path", "p2p.json", "--sp_time_path", "sp.json", "--search_granularity", "fine-grained"),
    *(word for name, file in _PADDLE_FILES.items() for word in (f"--{name}_path", f"{file}.json")),
    *("--time_profile_mode", "batch", "--layernum_list", "32", "--layernum", "32", "--seqlen_list", "2048"),
    *("--min_bsz", "16", "--max_bsz", "16", "--memory_upper_limit", "40", "--sp_space", "tp+sp"),
)


def _galvatron_paddle(folder: Path) -> None:
    """Files of Galvatron for Paddle."""
    shutil.copytree(FIXTURES / "galvatron" / "paddle", folder, dirs_exist_ok=True)


def _search_and_score_paddle(_: random.Random) -> int:
    """As `_search_and_score`."""
    code = main(["galvatron-search", *_PADDLE_FLAGS, "--time-limit", "2", "--out", "out/found.json"])
    scored = main(["galvatron-score", "fine_grained_config.json", *_PADDLE_FLAGS])
    return scored if code in (0, 3, 124) else code


def _search_and_score(_: random.Random) -> int:
    """What fits nowhere ends with 3, what takes long with 124."""
    code = main(["galvatron-search", "search.yaml", "--uneven", "1", "--time-limit", "2", "--out", "out/found.json"])
    return main(["galvatron-score", "strategy.json", "search.yaml"]) if code in (0, 3, 124) else code


def _lint(_: random.Random) -> int:
    """What is found ends with 1, which is no crash."""
    code = main(("lint", *_FROM_MEGATRON))
    return 0 if code == 1 else code


def _export(framework: str) -> tuple[str, ...]:
    return ("export", "plan.json", "--job", "job.json", "--to", framework)


def _exported(framework: str) -> Callable[[Path], None]:
    """What `export` writes for `framework` of the first plan that it takes, and the model's own file."""

    def prepare(folder: Path) -> None:
        from mm_autoparallel.integrations.catalog import frameworks

        _dump(folder / "model.json", DECODER)
        cluster = {"num_nodes": 1, "devices_per_node": 4, "device": "h100-80g"}
        workload = {"global_batch_size": 16, "seq_length": 256, "stack": "megatron-te"}
        _dump(folder / "job.json", {"model": "model.json", "cluster": cluster, "workload": workload})
        for sizes in ({"PP": 2, "DP": 2, "ZERO": 0}, {"PP": 1, "DP": 4, "ZERO": 3}):
            placed = [DECODER["num-layers"] // sizes["PP"]] * sizes["PP"]
            plan = {"TP": 1, "MBS": 1, **sizes}
            kept = {"layer_placement": {"llm_layer_placement": placed}, "e2e_time": 12.5, "throughput": 100.0}
            kept["layer_recompute"] = {"llm_layer_recompute": [1] + [0] * (sizes["PP"] - 1)}
            _dump(folder / "plan.json", {"parallel_config": plan, **kept})
            if _in(folder, lambda: main([*_export(framework), "--out", "exported"])) == 0:
                break
        else:
            raise AssertionError(f"{framework} takes none of these plans")
        exporter = frameworks()[framework].exporter
        assert exporter is not None
        _write(folder / "name.txt", exporter().read_back)

    return prepare


def _in(folder: Path, action: Callable[[], int]) -> int:
    here = Path.cwd()
    os.chdir(folder)
    try:
        return action()
    finally:
        os.chdir(here)


def _read_exported(framework: str) -> Callable[[random.Random], int]:
    """`import` or `lint` of the files, told the model, the devices, and what the files may leave out; or the plan
    written into them, where a framework takes that."""

    def read(rng: random.Random) -> int:
        from mm_autoparallel.api.imported import find_kind
        from mm_autoparallel.integrations.catalog import frameworks

        exporter = frameworks()[framework].exporter
        path = Path("exported", Path("name.txt").read_text(encoding="utf-8"))
        said = {"seq_length": 256, "global_batch_size": 16, "micro_batch_size": 1}

        def ask() -> int:
            takes = exporter is not None and exporter().patch is not None and path.suffix != ".py"
            if takes and rng.random() < 0.3:
                return main((*_export(framework), "--into", str(path), "--out", "out"))
            _, kind = find_kind(path, framework)
            beside = [f"--{key.replace('_', '-')}={value}" for key, value in said.items() if key in kind.takes]
            given = (str(path), "--model", "model.json", "--world-size", "4", "--device", "h100-80g", *beside)
            verb = rng.choice((("import", "--out", "out"), ("lint",)))
            code = main((*verb, *given, "--from", framework))
            return 0 if verb == ("lint",) and code == 1 else code  # it has found something

        return _ends(ask)

    return read


def _recipe(folder: Path) -> None:
    """A recipe of Megatron-Bridge, and the model's own file."""
    _dump(folder / "model.json", DECODER)
    _write(folder / "recipes.py", RECIPE)


def _solution(folder: Path) -> None:
    (folder / "model.sol").write_text(
        "Model status\nOptimal\n\n# Primal solution values\nFeasible\nObjective 12.5\n# Columns 3\nx_0 1\nx_1 0.5\n"
        "obj 12.5\n# Rows 1\nr0 1\n",
        encoding="utf-8",
    )


def _read_solution(rng: random.Random) -> int:
    from mm_autoparallel.integrations.mindformers.highs import read_solution

    return _call(lambda: read_solution(Path("model.sol")))


def _options(rng: random.Random) -> int:
    argv = list(rng.choice(OPTIONS))
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(1, len(argv))
        argv[at] = str(rng.choice((*TEXTS, *NUMBERS, "nan", "inf", *argv)))
    if "--cache" in argv or "\0" in "".join(argv):  # no argument of a process holds the latter
        argv = [argument.replace("\0", "") for argument in argv]
    if any(argument.startswith(("/", "..")) for argument in argv):  # what is asked for by name is written there
        return 0
    return main(argv)


OPTIONS = (
    ["plan", "job.json", "--time-limit", "1", "--out", "out", "--top-k", "2"],
    ["simulate", "job.json", "--config", "plan.json", "--trace", "trace.json"],
    ["place", "problem.json", "--time-limit", "1", "--certificate", "certificate.json"],
    ["edit", "job.json", "--config", "plan.json", "--move", "text:0:1:1", "--mode", "text:0:recompute=1", "--sizes",
     "PP=2", "--set", "cluster.num_nodes=1", "--out", "new.json"],
    ["simulate", "job.json", "--config", "plan.json", "--set", "cluster.device.memory_bytes=1e10"],
    ["explain", "job.json", "--config", "plan.json", "--why-not", "PP=1,TP=2", "--top-k", "1"],
    ["calibrate", "table.csv", "--device", "a100-80g", "--rows", "0", "--free", "matrix", "--out", "mine.json",
     "--set", "memory_fraction=0.5", "--name", "mine", "--note", "a note"],
    ["pipeline-search", "-yaml", "pretrain.yaml", "--memory", "memory.txt", "-layer_ratio", "0.5", "-b_ratio", "2",
     "-head_loss", "1.5", "-ra_ratio", "1"],
)  # fmt: skip


ACTIONS: tuple[dict[str, Any], ...] = (
    {"kind": "move", "modality": "text", "source": 0, "target": 1, "count": 1},
    {"kind": "mode", "modality": "text", "stage": 1, "mode": "recompute", "count": 1},
    {"kind": "sizes", "sizes": {"PP": 2, "SCHEDULE": "gpipe"}},
    {"kind": "knobs", "values": {"cluster.num_nodes": 1, "workload.seq_length": None}},
    {"kind": "job", "model": "qwen2-7b", "device": "b200-192g", "num_nodes": 1, "global_batch_size": 8,
     "seq_length": 512},
    {"kind": "pin", "name": "mine"},
    {"kind": "take", "name": "kept"},
    {"kind": "undo"},
)  # fmt: skip


def _studio(folder: Path) -> None:
    """A studio that was worked on, and what its page asks for next, a line each."""
    _simulated(folder)
    session = Session(folder)
    session.open_job(Path("job.yaml"), (folder / "job.yaml").read_text(encoding="utf-8"))
    for action in ({"kind": "pin", "name": "kept"}, ACTIONS[0]):
        act(session, Do.model_validate({"revision": session.revision, "action": action}))
    asked = [json.dumps({"revision": session.revision + n, "action": action}) for n, action in enumerate(ACTIONS)]
    (folder / "asked.txt").write_text("\n".join(asked), encoding="utf-8")


def _work_on_studio(rng: random.Random) -> int:
    """The page drawn, then one of the requests, and drawn again."""
    asked = Path("asked.txt").read_bytes().split(b"\n")

    def work() -> None:
        session = Session(Path.cwd())
        session.draw(None)
        request = read_request(Do, rng.choice(asked))
        act(session, request.model_copy(update={"revision": session.revision}))
        pack_report(*session.draw(None))

    return _call(work)


def _all_options(folder: Path) -> None:
    _job(folder)
    _dump(folder / "plan.json", PLAN)
    _problem(folder)
    _calibrate_table(folder)
    _pretrain(folder)


EXPORTED = (
    "accelerate",
    "colossalai",
    "deepspeed",
    "megatron-bridge",
    "mindspeed-llm",
    "paddle",
    "torch",
    "torchtitan",
)
"""Frameworks whose files a plan is written into, and read from."""

_OF_STUDIO = frozenset({".mm-autoparallel-studio"})
_SIMULATE = _command("simulate", "job.json", "--config", "plan.json")
_PLAN = _command("plan", "job.json", "--time-limit", "3", "--out", "out")

TARGETS: dict[str, Target] = {
    "job": Target(_simulated, _command("plan", "job.yaml", "--time-limit", "3", "--out", "out"), mutates="job.yaml"),
    "plan": Target(_simulated, _command("simulate", "job.yaml", "--config", "plan.json", "--json")),
    "model-mindspeed": Target(_with_model("model.json", FIXTURES / "mindspeed_mm_models" / "qwen2vl_2b.json"), _PLAN),
    "model-huggingface": Target(_with_model("config.json", FIXTURES / "huggingface" / "qwen2_vl_2b.json"), _PLAN),
    "model-internvl": Target(_with_model("config.json", FIXTURES / "huggingface" / "internvl3_8b_native.json"), _PLAN),
    "model-megatron": Target(
        _with_model("arguments.json", MEGATRON, workload={"global_batch_size": 16, "seq_length": 1024}), _PLAN
    ),
    "problem": Target(_problem, _command("place", "problem.json", "--time-limit", "1")),
    "certificate": Target(_certificate, _command("verify", "certificate.json")),
    "calibration": Target(_calibrated, _SIMULATE, mutates="mine.json"),
    "tables": Target(_tables, _validate),
    "calibrate": Target(
        _calibrate_table,
        _command("calibrate", "table.csv", "--device", "a100-80g", "--free", "matrix", "--out", "mine.json"),
    ),
    "pipeline-search": Target(
        _pretrain,
        _command("pipeline-search", "-yaml", "pretrain.yaml", "--memory", "memory.txt", "-t", "2"),
        edits=frozenset({"pretrain.yaml"}),
    ),
    "sapp-init": Target(
        lambda folder: _write(folder / "init.yaml", SAPP_INIT),
        _command("pipeline-search", "-yaml", "init.yaml", "-mb", "16", "-mem", "11000", "-t", "2"),
    ),
    "sapp-layers": Target(
        lambda folder: _dump(folder / "layers.json", SAPP_LAYERS),
        _command("pipeline-search", "-yaml", "layers.json", "-mb", "8", "-mem", "11000", "-s", "2", "-t", "2"),
    ),
    "nd-search": Target(
        _nd_search,
        _command(
            "nd-search", "--yaml_path", "pretrain.yaml", "--gbs", "16", "--rank_num", "16", "--parallel_num", "1",
            "--dryrun_data_dir", "dry", "--env_json", "env.json", "--output_path", "out",
        ),
    ),
    "rank": Target(
        _rank,
        _command(
            "rank", "--yaml_path", "yamls", "--parser_result", "profiles.csv", "--nd_path", "nd.csv", "--gbs", "1024",
            "--time-limit", "1",
        ),
    ),
    "timelines": Target(_timelines, _read_timelines),
    "cache": Target(
        _cached, _command("plan", "job.json", "--cache", "cache", "--out", "."), mutates="cache/", edits=frozenset(
            {"cache/", "auto_parallel_search_optimal_config.json"}
        ),
    ),
    "profiles": Target(_profiled, _SIMULATE, mutates="store/"),
    "launch-script": Target(_scripts, _write_script),
    "plan-script": Target(_launch, _plan_script("train.sh")),
    "plan-trainer": Target(_trainer, _plan_script("training/finetune.sh", "--model-config", "config.json")),
    "import-megatron": Target(_megatron_script, _command("import", *_FROM_MEGATRON, "--out", "out")),
    "import-mindformers": Target(
        _pretrain,
        _command("import", "pretrain.yaml", "--device", "ascend-910b-64g", "--out", "out"),
        mutates="pretrain.yaml",
    ),
    "galvatron": Target(_galvatron, _search_and_score),
    "galvatron-paddle": Target(_galvatron_paddle, _search_and_score_paddle),
    "lint-megatron": Target(_megatron_script, _lint),
    "export-megatron": Target(_megatron_export, _command("export", *_TO_MEGATRON, "--out", "out")),
    "recipe": Target(
        _recipe,
        _command("import", "recipes.py", "--model", "model.json", "--world-size", "8", "--device", "h100-80g"),
        mutates="recipes.py",
        edits=frozenset({"imported/"}),
    ),
    "solution": Target(_solution, _read_solution),
    "studio": Target(_studio, _work_on_studio, mutates=".mm-autoparallel-studio/session", edits=_OF_STUDIO),
    "studio-requests": Target(_studio, _work_on_studio, mutates="asked", edits=_OF_STUDIO),
    **{f"files-{name}": Target(_exported(name), _read_exported(name), mutates="exported/") for name in EXPORTED},
    "options": Target(_all_options, _options, mutates="nothing", edits=frozenset({"pretrain.yaml"})),
}  # fmt: skip


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
