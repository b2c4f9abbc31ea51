"""No search compiles anything while its clock runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.pipeline.placement.compiling import samples
from mm_autoparallel.pipeline.placement.incumbents.sums import collect_sums
from mm_autoparallel.pipeline.placement.segments import cut_into_segments

NO_SEARCH = ("pipeline/balance/", "pipeline/placement/bubbles/", "pipeline/simulate/encoders/")
"""Rooms that no search of a plan enters, or only one with encoders in bubbles, which has them compiled."""


@pytest.mark.nightly
def test_every_kernel_is_compiled_before(tmp_path: Path, repository: Path, sources: dict[str, ast.Module]) -> None:
    command = "from mm_autoparallel.planner.search.watched import compile_search; compile_search(('free',), 2)"
    folders = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", command], cwd=repository, env=os.environ | folders, check=True)
    compiled = {
        f"{path.parent.name.rpartition('_')[0]}/{path.name.rpartition('-')[0]}" for path in tmp_path.rglob("*.nbi")
    }
    kernels = {
        f"{Path(path).parent.name}/{Path(path).stem}.{node.name}"
        for path, tree in sources.items()
        if not path.startswith(NO_SEARCH)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(map(is_kernel, node.decorator_list))
    }
    assert len(kernels) > 40
    assert kernels == compiled


def test_whole_numbers_compile_nothing_anew() -> None:
    """Figures that are no floats in the problem of a caller are floats in the kernels' arrays."""
    for segments, (_, full) in samples():
        blocks = tuple(replace(block, transient_bytes=0, step_once_bytes=0) for block in segments.problem.chain)
        whole = replace(
            segments.problem, chain=blocks, memory_limit_bytes=(16, 16), stage_static_bytes=(0, 0), stage_tail_ms=(0, 0)
        )
        expected = [getattr(each, "dtype", type(each)) for each in collect_sums(segments, full)]
        found = [getattr(each, "dtype", type(each)) for each in collect_sums(cut_into_segments(whole), full)]
        assert found == expected


def is_kernel(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "kernel"
