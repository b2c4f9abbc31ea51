"""What the probes of Galvatron's releases share: cases of standard input, its engine, answers on standard output."""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def read_cases(bare: tuple[str, ...]) -> list:
    """The cases; what they ask is importable then. bare: packages whose own beginnings import what trains."""
    asked = json.load(sys.stdin)
    folder = Path(asked["folder"])
    sys.path.insert(0, str(folder))
    for name in bare:
        module = ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    return asked["cases"]


def start_engine(engine, case: dict, folder: str):
    """`engine`, which looks at the model of `case` with the profiles in its places."""
    sizes = {"hidden_size": case["hidden_size"], "layer_num": case["num_layers"], "seq_len": case["seq_length"]}
    engine.set_search_engine_info(folder, [sizes], case["name"])
    engine.initialize_search_engine()
    return engine


def answer_all(cases: list, make_engine: Callable, score: Callable, read: Callable | None = None) -> None:
    """Writes what its engine says to each case: scores of its strategies, what it finds, what its reader takes."""
    with contextlib.redirect_stdout(sys.stderr):
        answers = [_answer(case, make_engine, score, read) for case in cases]
    json.dump(answers, sys.stdout)


def _answer(case: dict, make_engine: Callable, score: Callable, read: Callable | None) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(make_engine(case, folder), case, folder)
        found = {"scores": [score(engine, case, strategy) for strategy in case.get("score", ())]}
        if case.get("search"):
            begin_s = time.process_time()
            samples_per_s = engine.parallelism_optimization()
            found["cpu_s"] = time.process_time() - begin_s
            files = list(Path(folder).glob("galvatron_config_*.json"))
            found["found"] = json.loads(files[0].read_text()) if files else None
            found["found_s"] = found["found"]["global_bsz"] / samples_per_s if files else None
        if read and case.get("read"):
            found["read"] = [read(case, strategy) for strategy in case.get("score", ())]
        return found
