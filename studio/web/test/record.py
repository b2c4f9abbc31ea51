"""Records what a studio's server would say, for fake_studio.mjs: real plans and figures, in the words of the contract.

    python studio/web/test/record.py FOLDER

FOLDER gets plain, wide (16 stages, 256 micro-batches), chunks, hostile and empty, each NAME.studio (as GET /state
answers; the second plan of its report is the one that the fake shows after an edit), and space.json, sources.json,
catalog.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mm_autoparallel as mmap
from mm_autoparallel.api.report_page import build_report
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.reports.page.html import pack_report
from mm_autoparallel.studio import document

REPOSITORY = Path(__file__).resolve().parents[3]
HOSTILE = "</script><script>alert(1)</script>\u202e" + "x" * 260
SAMPLES = 512
"""A step of examples/qwen2vl_72b/job.yaml."""

PLANS = {
    "plain": (Strategy(pp=4, tp=8, dp=4, mbs=1), (10, 23, 24, 23), (11, 22, 24, 23)),
    "chunks": (Strategy(pp=2, tp=8, dp=8, mbs=1, vpp=2), (8, 24, 24, 24), (9, 23, 24, 24)),
    "wide": (Strategy(pp=16, tp=8, dp=1, mbs=2), (3, *[5] * 13, 6, 6), (4, 4, *[5] * 12, 6, 6)),
}
"""Text layers of a plan, and of the one that the fake shows after an edit; vision is on the first stage."""


ORDERS = ("0F0 1F0 0B0 1B0",) * 4
"""What the stages of `plain` are said to run."""


def record(folder: Path) -> None:
    """Writes all recordings into `folder`."""
    job = mmap.read_job(REPOSITORY / "examples" / "qwen2vl_72b" / "job.yaml")
    for name, (strategy, text, edited) in PLANS.items():
        plans = {"now": _plan(strategy, text), "edited": _plan(strategy, edited)}
        _write(folder / f"{name}.studio", job, plans)
    plain = _plan(*PLANS["plain"][:2])
    _write(folder / "hostile.studio", job, {HOSTILE: plain, HOSTILE + "2": plain}, HOSTILE)
    empty = _studio(None, "", {}, ()).model_copy(update={"undo": None, "redo": None, "bound": None})
    (folder / "empty.studio").write_bytes(pack_report(empty, b""))  # type: ignore[arg-type]
    sources = mmap.report(job, {"now": plain}, search=False).report.sources
    assert sources
    (folder / "sources.json").write_text(sources.model_dump_json())
    (folder / "space.json").write_text(_space().model_dump_json())
    catalog = document.Catalog(
        devices=("ascend-910b-64g", "h100-80g"),
        models=("qwen2-vl-72b",),
        configs=("config.json",),
        launches=("train.sh",),
        exporters=("megatron-core",),
    )
    (folder / "catalog.json").write_text(catalog.model_dump_json())
    finding = document.Finding(
        rule="needless-recompute",
        severity="warning",
        line=49,
        stage=None,
        message="32 layers <b>recomputed</b>",
        mend="without --x",
    )
    findings = document.Findings(file="train.sh", findings=(finding,))
    (folder / "findings.json").write_text(findings.model_dump_json())


def _plan(strategy: Strategy, text: tuple[int, ...]) -> Plan:
    """Every text layer recomputed, so that there are counts to step down."""
    none = (0,) * len(text)
    return Plan(strategy, {"vision": (32, *none[1:]), "text": text}, {"vision": none, "text": text}, SAMPLES)


def _write(path: Path, job: mmap.Job, plans: dict[str, Plan], word: str = "") -> None:
    page = build_report(job, {name: mmap.simulate(job, plan) for name, plan in plans.items()}, None, None, {}, "")
    report = page.report
    if word:
        plan = report.plans[0].model_copy(update={"strategy": word, "warnings": (word,), "longest_path": word})
        job_page = report.job.model_copy(update={"name": word, "facts": (word,)})
        report = report.model_copy(update={"plans": (plan, report.plans[1]), "job": job_page})
    strategy = plans[next(iter(plans))].strategy
    sizes = {"PP": strategy.pp, "TP": strategy.tp, "DP": strategy.dp, "MBS": strategy.mbs}
    modes = {"vision": ("recompute",), "text": ("recompute",)}
    path.write_bytes(pack_report(_studio(report, word, modes, tuple(sizes.items())), page.block))  # type: ignore[arg-type]


def _studio(report: Any, word: str, modes: dict[str, tuple[str, ...]], sizes: tuple[tuple[str, int], ...]) -> Any:
    """word: in every place that names come into; empty: plain ones."""
    return document.Studio(
        schema_name=document.SCHEMA,
        revision=1,
        report=report,
        bound=document.Bound(
            words=word or "This job's space has not been searched: how far this plan is from the best is unknown.",
            lower_bound_ms=None,
            gap_fraction=None,
            proven=False,
            strategy_bound_ms=None,
            strategy_gap_fraction=None,
        ),
        sizes=(
            *(document.SizeChoices(name=name, value=value, choices=(1, 2, 4, 8, 16)) for name, value in sizes),
            document.SizeChoices(name=word or "schedule", value=word or "1f1b", choices=(word or "1f1b", "gpipe")),
        )
        if report
        else (),
        modes=modes,
        knobs=(
            document.Knob(
                key="cluster.device.memory_bytes",
                title=word or "Memory of a device",
                value=64 * 2**30,
                given=64 * 2**30,
                low=16 * 2**30,
                high=256 * 2**30,
                unit="bytes",
                whole=True,
            ),
            document.Knob(
                key="workload.images_per_sample",
                title="Images of a sample",
                value=4,
                given=4,
                low=1,
                high=4,
                whole=True,
            ),
            document.Knob(
                key="cluster.device",
                title="Device",
                value="ascend-910b-64g",
                given="ascend-910b-64g",
                choices=("ascend-910b-64g", "h100-80g"),
            ),
        )
        if report
        else (),
        pins=(word,) if word else (),
        message=word or "This is the plan as it was read.",
        undo=word or None,
        redo=None,
        commands=(word or "mm-autoparallel simulate job.yaml --config plan.json",) if report else (),
        answers=(document.Answer(question=word, words=(word,), step_ms=None),) if word else (),
        work=None,
        files=(document.Offer(name=word or "plan.json", title=word or "The plan's result file"),) if report else (),
        search_revision=None,
        orders=ORDERS if report and not word and len(report.plans[0].stages) == len(ORDERS) else (),
    )


def _space() -> document.Space:
    """Of a job that is searched in a second."""
    job = mmap.Job(
        {
            "name": "small",
            "text": {
                "vocab_size": 32000,
                "layers": {"num_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 8, "norm": "rms"},
            },
        },
        {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 4},
        {"global_batch_size": 16, "seq_length": 1024},
        search={"pp": [4], "tp": [1], "mbs": [1, 2]},
    )
    search = mmap.report(job, found=mmap.plan(job, time_limit_s=30)).report.search
    assert search
    return document.Space(search_revision=1, strategies=search.strategies)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    record(folder)
