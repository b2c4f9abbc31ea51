"""Command lines of Taylor's examples and of SAPP: what has a meaning here is taken, the rest refused by name."""

from __future__ import annotations

import argparse

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.cli.parser import VERBS, build_parser
from mm_autoparallel.cli.spellings import REFUSED, SAME, translate_options


def options(verb: str) -> set[str]:
    parser = argparse.ArgumentParser()
    VERBS[verb].add_arguments(parser)
    return set(parser._option_string_actions)


def test_every_spelling_leads_to_an_option_and_shadows_none() -> None:
    for verb, same in SAME.items():
        assert set(same.values()) <= options(verb)
        assert not set(same) & (options(verb) | set(REFUSED[verb]))
    for verb, refused in REFUSED.items():
        assert not set(refused) & options(verb), verb


def test_taylors_example_line_is_understood() -> None:
    line = (
        "nd-search --yaml_path j.yaml --mindfomres_dir run.py --dataset_dir w.mindrecord --gbs 9216 --parallel_num 16"
    )
    arguments = build_parser().parse_args(translate_options(line.split()))
    assert (str(arguments.mindformers_dir), str(arguments.dataset), arguments.gbs) == ("run.py", "w.mindrecord", 9216)


def test_pipeline_balances_own_line_is_understood() -> None:
    line = "pipeline-search --init demo.yaml --stage 16 --micro_batch=16 --max_memory 62000 -solver highs"
    arguments = build_parser().parse_args(translate_options(line.split()))
    assert (str(arguments.yaml), arguments.s, arguments.mb, arguments.mem) == ("demo.yaml", 16, 16, 62000)
    assert arguments.solver_name == "HIGHS"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pipeline-search -llm 0 -yaml a.yaml", ["-llm", "the YAML says"]),
        ("pipeline-search -shell run.sh", ["-shell", "MindSpeed"]),
        ("pipeline-search -yaml a.yaml -is_write n", ["-is_write", "a copy"]),
        ("pipeline-search -yaml a.yaml -fit=1", ["-fit", "--memory FILE"]),
        ("nd-search --alg_phase 1", ["--alg_phase", "rank"]),
        ("rank --yaml_path a --env_config_json b.json", ["--env_config_json", "leave it out"]),
    ],
)
def test_what_means_nothing_here_is_refused_by_name(
    line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in told
