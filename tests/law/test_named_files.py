"""Files that docstrings and comments name are there, so that a reader who follows one arrives."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

OF_OTHERS = {
    *("config_utils.py", "configuration_intern_vit.py", "configuration_internlm2.py", "configuration_step_vl.py"),
    *("cross_entropy.py", "fully_shard_parallel.py", "fused_a2a.py", "integrations/moe.py", "internvit_model.py"),
    *(
        "accelerate/utils/launch.py",
        "hybrid_parallel_plugin.py",
        "planned.py",
        "planned_layers.py",
        "planned_plugin.py",
    ),
    *("bridge_communicator.py", "hetero_parallel.py"),
    *("config_registry.py", "galvatron/core/cost_model", "hybrid_parallel_config.py", "search_dist.py"),
    *("json.py", "llama_transformer.py", "memory_monitor.py", "modelhub.py", "modeling_intern_vit.py", "moe_utils.py"),
    *("multimodal_projector.py", "my_model.py", "posttrain_gpt.py", "posttrain_qwen2vl_dpo.py"),
    *("pretrain_bert.py", "pretrain_gpt.py"),
    *("qwen2vl_vit_model.py", "qwen35_config.py", "sapp_solver.py", "schedules.py", "trainer.py"),
    *("transformers_model.py", "vision_transformer_block.py", "vlm_model.py"),
    *("finetune_qwen35_vl.py", "run_recipe.py", "train_fsdp2.py", "ulysses_cp_attention.py"),
    *("megatron_mimo_builder.py", "megatron_mimo_config.py", "megatron_mimo_provider.py"),
}
"""Files of other projects that are named as ours could be; those in folders that we do not have need no entry."""

TWO_MEANINGS = {"mindformers", "mindspeed_llm", "mindspeed_mm", "torch", "torchtitan"}
"""Folders of ours that are called as a whole other project: what is named in them is not looked for."""

FORMER = {"tests", "frameworks", "proof", "bounds"}
"""Folders that the package had, and the tests."""

_PATH = re.compile(r"(?<![\w/.{}\-])((?:[A-Za-z_][\w\-]*/)*[A-Za-z_][\w\-]*)(\.py)?(?![\w/{}]|\.\w)")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring and comment, words that a line's end divides put together."""
    names_any = re.search(r"#.*(?:\.py|\w/\w)", source)  # to take a file apart into tokens takes a while
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if names_any else ():
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, re.sub(r"/\n\s*", "/", node.value.value)


def list_ends(paths: Iterable[str]) -> set[str]:
    """Every path, and what is left of it without its first folders."""
    parts = [path.split("/") for path in paths]
    return {"/".join(path[start:]) for path in parts for start in range(len(path))}


def missing(source: str, ends: set[str], folders: set[str]) -> list[str]:
    """`line: path` of each file or folder of ours that is named and is none of `ends`. folders: names of ours."""
    wrong = []
    for line, text in texts(source):
        for name, extension in _PATH.findall(text):
            first, has_folder, _ = name.partition("/")
            if not (extension or has_folder) or (has_folder and first not in folders) or first in TWO_MEANINGS:
                continue
            path = name + extension
            if path not in OF_OTHERS and not {path, f"{path}.py"} & ends:
                wrong.append(f"{line}: {path}")
    return wrong


def test_named_files_are_there(repository: Path) -> None:
    package = repository / "mm_autoparallel"
    files = [path for path in package.rglob("*.py") if "__pycache__" not in path.parts]
    folders = {folder.name for path in files for folder in path.relative_to(package).parents if folder.name}
    found = [path for room in ("mm_autoparallel", "tests") for path in (repository / room).rglob("*")]
    ends = list_ends(str(path.relative_to(repository)) for path in found if "__pycache__" not in path.parts)
    wrong = [
        f"{path.relative_to(package)}:{named}"
        for path in files
        for named in missing(path.read_text(encoding="utf-8"), ends, folders | FORMER)
    ]
    assert not wrong, "name the file that is meant, or add it to OF_OTHERS:\n" + "\n".join(wrong)


def test_a_missing_one_is_found() -> None:
    source = (
        '"""As job/cluster.py and search/\n    gone.py; search/lost, core/theirs.py, a/b, gone.py."""\n# job/no.py\n'
    )
    ends = list_ends(["model/job/cluster.py", "planner/search"])
    found = missing(source, ends, {"model", "job", "planner", "search"})
    assert sorted(found) == ["1: gone.py", "1: search/gone.py", "1: search/lost", "3: job/no.py"]
