"""No search compiles anything while its clock runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
def test_every_kernel_is_compiled_before(tmp_path: Path, repository: Path, sources: dict[str, ast.Module]) -> None:
    command = "from mm_autoparallel.planner.search.watched import compile_search; compile_search(('free',))"
    folders = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", command], cwd=repository, env=os.environ | folders, check=True)
    compiled = {path.name.rpartition("-")[0] for path in tmp_path.rglob("*.nbi")}
    kernels = {
        f"{Path(path).stem}.{node.name}"
        for path, tree in sources.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(map(is_kernel, node.decorator_list))
    }
    assert len(kernels) > 40
    assert kernels == compiled


def is_kernel(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "kernel"
