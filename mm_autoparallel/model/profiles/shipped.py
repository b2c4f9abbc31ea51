"""Profiles that come with mm-autoparallel, beside those of one's own: where both lie.

    subgraph_profiles/                        the store of the current folder: what its owner traces and measures
        traced/<model>-<hash>/*.json
        <device>/network.json, <device>/<model>-<hash>/*.json
        shipped/                              of the repository: the same folders, which no run writes
            traced/…, <device>/…

A wheel has `subgraph_profiles/shipped` as `mm_autoparallel/subgraph_profiles`. One's own files win.
"""

from __future__ import annotations

from pathlib import Path

STORE = Path("subgraph_profiles")
"""Where `trace`, `profile` and pretrain scripts keep what they find, unless they are given another folder."""

TRACED = "traced"
"""The folder of a store that holds traces, of any device."""

_PACKAGE = Path(__file__).parents[2]
_NAMED = STORE / "shipped"


def shipped_store() -> Path:
    """The store that comes with the package, or lies beside it in a checkout; seen from the current folder where that
    holds it.
    """
    packaged = _PACKAGE / STORE
    found = packaged if packaged.is_dir() else _PACKAGE.parent / _NAMED
    here = Path.cwd()
    return found.relative_to(here) if found.is_relative_to(here) else found


def list_traces(digits: str) -> list[tuple[Path, Path]]:
    """The trace files of models whose hash begins with `digits`: what plans call each, and where it lies.

    Those of the current folder's store first; of the shipped ones those that have none of the same name there.
    """
    pattern = f"{TRACED}/*-{digits}/*.json"
    own = sorted(STORE.glob(pattern))
    names, shipped = {path.name for path in own}, shipped_store()
    others = [path for path in sorted(shipped.glob(pattern)) if path.name not in names]
    return [(path, path) for path in own] + [(_NAMED / path.relative_to(shipped), path) for path in others]


def shipped_models() -> tuple[str, ...]:
    """The folders of all models whose traces are shipped: name and the first digits of the hash."""
    return tuple(folder.name for folder in sorted((shipped_store() / TRACED).glob("*")) if folder.is_dir())
