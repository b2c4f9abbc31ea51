"""Stand-in: the arguments of this process."""

from types import SimpleNamespace

_arguments: list[SimpleNamespace] = []


def get_args() -> SimpleNamespace:
    return _arguments[-1]


def set_args(arguments: SimpleNamespace) -> None:
    _arguments.append(arguments)
