"""Options of Taylor's parallel search and of SAPP pipeline balance that are called otherwise here, or mean nothing.

What has a meaning is taken under its own name here. What has none is refused with what to use: an option that were
read and ignored would let its user believe that it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mm_autoparallel.errors import JobError

_NO_DRY_RUNS = "no dry run is started, so it has no use; leave it out"
_NO_SCRIPT = "a launch script of MindSpeed is no pretrain YAML; it is planned by the MindSpeed-MM verbs and its hook"
_NO_PIECES = "files of SAPP are balanced without sequence splits; a pretrain YAML with seq_split_num has them planned"
_AS_YAML = "the YAML says which model it is; leave it out"

SAME: Mapping[str, Mapping[str, str]] = {
    "nd-search": {
        "--mindfomres_dir": "--mindformers_dir",
        "--dataset_dir": "--dataset",
        "--env_config_json": "--env_json",
    },
    "pipeline-search": {
        "--train_yaml": "--yaml",
        "-init": "--yaml",
        "--init": "--yaml",
        "-lf": "--yaml",
        "--layer_json": "--yaml",
        "--mindformers_loc": "--mindformers",
        "--mindfomres_dir": "--mindformers",
        "-solver": "--solver_name",
        "---layer_ratio": "--layer_ratio",
        "---backward_ratio": "--b_ratio",
        "---head_loss": "--head_loss",
        "---recompute_ratio": "--ra_ratio",
        "--time_limit": "--t",
        "--stage": "--s",
        "--micro_batch": "--mb",
        "--interleave_degree": "--i",
        "--max_memory": "--mem",
    },
    "rank": {"--mindfomres_dir": "--mindformers_dir"},
}
"""verb → their option → the one it is here."""

_SCRIPTS = dict.fromkeys(
    ("-shell", "--train_shell", "--shell_path", "-mindspeed", "--mindspeed_loc", "--mindspeed_dir"), _NO_SCRIPT
)
_DRY_RUNS = dict.fromkeys(
    ("-env", "--env_config_json", "-register", "--register_path", "-dryrun_lim", "--dryrun_lim"), _NO_DRY_RUNS
)

REFUSED: Mapping[str, Mapping[str, str]] = {
    "nd-search": _SCRIPTS
    | {
        "-dryrun_lim": _NO_DRY_RUNS,
        "--dryrun_lim": _NO_DRY_RUNS,
        "--select_recompute": "every layer is recomputed whole here; `pipeline-search --select y` searches the rest",
        "--alg_phase": "its phases are verbs: nd-search, rank, pipeline-search; leave it out",
    },
    "pipeline-search": _SCRIPTS
    | _DRY_RUNS
    | {
        "-llm": _AS_YAML,
        "--llm_class": _AS_YAML,
        "-is_write": "what is found is written into the YAML; give a copy of it to keep yours",
        "--is_write": "what is found is written into the YAML; give a copy of it to keep yours",
        "-fit": "memory is not fitted to dry runs; give their figures with --memory FILE",
        "--fit_level": "memory is not fitted to dry runs; give their figures with --memory FILE",
        "-seq": _NO_PIECES,
        "--seq": _NO_PIECES,
        "-lm": "`--order low_memory` is what it asks for",
        "--less_memory": "`--order low_memory` is what it asks for",
        "-manual": "lists of one's own are not compared; put them into a pretrain YAML",
        "--manual_config": "lists of one's own are not compared; put them into a pretrain YAML",
        "-auto": "it starts dry runs, and none is started here; give the training YAML with -yaml",
        "--auto_ppb": "it starts dry runs, and none is started here; give the training YAML with -yaml",
        "-train": "give the training YAML with -yaml",
        "--training_config": "give the training YAML with -yaml",
    },
    "rank": _SCRIPTS
    | _DRY_RUNS
    | dict.fromkeys(
        ("-dryrun", "--dryrun", "-check", "--check"),
        "pipelines are searched from the profile table, without dry runs and checks of one; leave it out",
    ),
}
"""verb → their option → why it is refused, and what to use."""


def translate_options(argv: Sequence[str]) -> list[str]:
    """`argv` with options as they are called here. Raises JobError naming one that has no meaning here."""
    verb = argv[0] if argv else ""
    same, refused = SAME.get(verb, {}), REFUSED.get(verb, {})
    translated = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name in refused:
            raise JobError(f"{verb} {name}: {refused[name]}")
        translated.append(same.get(name, name) + equals + value)
    return translated
