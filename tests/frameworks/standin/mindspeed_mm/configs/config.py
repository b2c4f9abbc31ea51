"""Stand-in: model.json with attributes for keys."""

import json
from pathlib import Path
from types import SimpleNamespace


class Config:
    def __init__(self, content):
        for key, value in content.items():
            setattr(self, key, Config(value) if isinstance(value, dict) else value)


def mm_extra_args_provider(parser):
    parser.add_argument("--mm-model")
    parser.add_argument("--mm-data")
    return parser


def merge_mm_args(arguments):
    if not hasattr(arguments, "mm"):
        arguments.mm = SimpleNamespace(model=Config(json.loads(Path(arguments.mm_model).read_text())))
