"""The page as a person sees it: in Chromium, driven by studio/web/test.

Needs node, what `npm ci` installs in studio/web, and Chromium (on Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from two_modules import APART, PHASES, make_job

import mm_autoparallel as mmap
from mm_autoparallel.api.report_page import build_report
from mm_autoparallel.api.results import Simulation
from mm_autoparallel.files import read_document
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>alert(1)</script>\u202e" + "x" * 260


@pytest.fixture(scope="module")
def reports(repository: Path, tmp_path_factory: pytest.TempPathFactory, job: mmap.Job, best: mmap.PlanResult) -> Path:
    """plain.html: 72B and its space; hostile.html: names that would run; long.html: 64 stages, 1,024 micro-batches;
    wide.html: 16,384 devices; layouts.html: encoders of sizes of their own; drawn.html: samples that differ."""
    folder = tmp_path_factory.mktemp("reports")
    large = mmap.read_job(repository / "examples" / "qwen2vl_72b" / "job.yaml")
    mmap.report(large, found=mmap.plan(large, top_k=2), command="mm-autoparallel report job.yaml").write(
        folder / "plain.html"
    )
    model = {
        "name": HOSTILE[:150],
        "text": {
            "vocab_size": 32000,
            "layers": {"num_layers": 64, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "norm": "rms"},
        },
    }
    hostile = mmap.Job(
        model,
        {"device": "a100-80g", "num_nodes": 8, "devices_per_node": 8},
        {"global_batch_size": 1024, "seq_length": 256},
        search={"pp": [64], "tp": [1], "mbs": [1]},
    )
    wide = mmap.Job(
        model,
        {"device": "a100-80g", "num_nodes": 2048, "devices_per_node": 8},
        {"global_batch_size": 16384, "seq_length": 256},
        search={"pp": [8], "tp": [8], "cp": [1], "mbs": [1]},
    )
    mmap.report(wide, found=mmap.plan(wide, time_limit_s=60)).write(folder / "wide.html")
    long = Simulation(hostile, mmap.plan(hostile, time_limit_s=60).best[0].estimate)
    build_report(hostile, {HOSTILE: long}, None, None, {}, HOSTILE).write(folder / "long.html")
    arranged = make_job()
    plans = {
        name: Simulation(arranged, evaluate(arranged, one)) for name, one in (("apart", APART), ("phases", PHASES))
    }
    build_report(arranged, plans, None, None, {}, "mm-autoparallel report").write(folder / "layouts.html")
    differing = mmap.Job(
        {"text": model["text"]},
        {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 8},
        {"global_batch_size": 16, "samples": {"text_tokens": {"mean": 200, "spread_fraction": 1.0}}},
    )
    alike = Plan(Strategy(1, 1, 8, 1), {"text": (64,)}, {"text": (0,)}, 16)
    drawn = {"plan": Simulation(differing, evaluate(differing, alike))}
    build_report(differing, drawn, None, None, {}, "mm-autoparallel report").write(folder / "drawn.html")
    mmap.report(job, {HOSTILE: best.plan}, found=best, command=HOSTILE).write(folder / "hostile.html")
    return folder


def test_in_chromium(web: Path, reports: Path) -> None:
    print(in_chromium(web, reports))


@pytest.mark.nightly
def test_the_whole_space_in_chromium(repository: Path, web: Path, reports: Path) -> None:
    """72B over all choices that a search has, tens of thousands of strategies: at most 3 MB."""
    job = read_document(repository / "examples" / "qwen2vl_72b" / "job.yaml", "job file")
    job["model"] = str(repository / "examples" / "qwen2vl_72b" / job["model"])
    job["search"] = {
        "max_vpp": 4,
        "zero": [0, 1, 2, 3],
        "reshard": [True, False],
        "sequence_parallel": [True, False],
        "optimizer_offload": [False, True],
        "modes": ["recompute", "selective", "offload"],
    }
    path = reports / "whole.yaml"
    path.write_text(json.dumps(job))
    whole = mmap.read_job(path)
    mmap.report(whole, found=mmap.plan(whole, time_limit_s=300)).write(reports / "whole.html")
    print(in_chromium(web, reports))


def in_chromium(web: Path, reports: Path) -> str:
    """What the tests of the page print. Fails where one of them does."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs Chromium (on Debian: apt-get install chromium)")
    done = subprocess.run(
        ["node", "--test", "test/report.test.mjs"],
        cwd=web,
        env={**os.environ, "REPORTS": str(reports), "CHROMIUM": chromium},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
