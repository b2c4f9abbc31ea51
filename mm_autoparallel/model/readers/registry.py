"""Which frameworks are registered, and who of them knows a file.

A distribution registers a framework by an entry point of the group `mm_autoparallel.frameworks`, which names a
Framework (integrations/framework.py). This package's own are found by their folders, so that a checkout without
metadata has them too. Everything is loaded when it is first asked for. What another distribution registers wrongly is
told once, by the distribution's name, and left out.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import describe_value
from mm_autoparallel.model.readers.model_form import ModelForm
from mm_autoparallel.streams import warn

GROUP = "mm_autoparallel.frameworks"
OWN = "mm-autoparallel"
FOLDERS = "mm_autoparallel.integrations"
"""Whose folders hold this package's own: the FRAMEWORK of FOLDER/framework.py, called FOLDER with dashes."""


@dataclass(frozen=True)
class FrameworkModels:
    """What the readers of models ask of a framework; integrations/framework.py has the rest.

    title: its name for people. models: gives the forms of model files that it reads; called when the first model file
    is read, so that what it imports costs nothing before.
    """

    title: str
    models: Callable[[], Sequence[ModelForm]] = tuple


@dataclass(frozen=True, eq=False)
class Registered:
    """A framework as it is registered: under which name, and by which distribution."""

    name: str
    distribution: str
    framework: FrameworkModels

    @property
    def is_own(self) -> bool:
        """Whether it is this package's."""
        return self.distribution == OWN


class Claimant(Protocol):
    """What knows files: `is_one` says whether it knows one; those with `asked_last` are asked after all others."""

    @property
    def is_one(self) -> Callable[[Any], bool]: ...

    @property
    def asked_last(self) -> bool: ...


Given = TypeVar("Given")
Asked = TypeVar("Asked", bound=Claimant)


@dataclass(frozen=True)
class Offer(Generic[Given]):
    """Something that a framework gives."""

    of: Registered
    given: Given


_offered: dict[tuple[Registered, str], tuple[Offer[Any], ...]] = {}
"""What was given, by the framework and its field."""

_broken: dict[str, None] = {}
"""What messages said of other distributions, in its order."""


def list_frameworks() -> tuple[Registered, ...]:
    """All that are registered: other distributions' by their names, then this package's."""
    return (*_others(), *_own())


def list_offers(provider: str, kind: type[Given]) -> tuple[Offer[Given], ...]:
    """What all frameworks' `provider` (a field that is called without arguments) gives, each a `kind`.

    Other distributions' come first, because they know their own files more closely than by an ending or a key.
    """
    found: list[Offer[Given]] = []
    for one in list_frameworks():
        if (one, provider) not in _offered:
            _offered[one, provider] = _offers_of(one, provider, kind)
        found += _offered[one, provider]
    return tuple(found)


def find_offer(offers: Sequence[Offer[Asked]], thing: object, what: str) -> Offer[Asked] | None:
    """The first of `offers` that knows `thing`, called `what` in messages; None where none does.

    Raises JobError where several other distributions know it.
    """
    for asked_last in (False, True):
        asked = [offer for offer in offers if bool(offer.given.asked_last) is asked_last]
        others = [offer for offer in asked if not offer.of.is_own and _knows(offer, thing)]
        if len({offer.of.name for offer in others}) > 1:
            names = " and ".join(f"{offer.of.name} (distribution {offer.of.distribution})" for offer in others)
            raise JobError(f"{what} is taken for theirs by the frameworks {names}; uninstall the one that is not meant")
        found = others or [offer for offer in asked if offer.of.is_own and _knows(offer, thing)]
        if found:
            return found[0]
    return None


def list_broken() -> tuple[str, ...]:
    """A sentence for each thing that another distribution registers and that cannot be used, as far as it was asked."""
    list_frameworks()
    return tuple(_broken)


def describe_broken() -> str:
    """What a message that nobody knows a file adds of those that could not be asked."""
    return "".join(f". Not asked: {sentence}" for sentence in list_broken())


def forget() -> None:
    """Look again at the next call: other distributions are there than before."""
    _others.cache_clear()
    _own.cache_clear()
    _offered.clear()
    _broken.clear()


@lru_cache(maxsize=1)
def _own() -> tuple[Registered, ...]:
    folders = [found.name for found in pkgutil.iter_modules(import_module(FOLDERS).__path__) if found.ispkg]
    return tuple(
        Registered(name.replace("_", "-"), OWN, import_module(f"{FOLDERS}.{name}.framework").FRAMEWORK)
        for name in folders
    )


@lru_cache(maxsize=1)
def _others() -> tuple[Registered, ...]:
    named: dict[str, list[tuple[str, EntryPoint]]] = defaultdict(list)
    for distribution, entry in _entries():
        named[entry.name].append((distribution, entry))
    own = {one.name for one in _own()}
    found = []
    for name, entries in sorted(named.items()):
        whose = " and ".join(distribution for distribution, _ in entries)
        if name in own:
            _tell(whose, f"registers the framework {name}, a name that {OWN} itself has; rename it")
        elif len(entries) > 1:
            _tell(whose, f"register the framework {name} more than once, and none of these is used; keep one of them")
        else:
            framework = _load(*entries[0])
            if framework is not None:
                found.append(Registered(name, whose, framework))
    return tuple(found)


def _entries() -> Iterator[tuple[str, EntryPoint]]:
    """Entry points of the group, with their distributions' names; of a distribution that is there twice the first.

    What lies in the current folder is no installed distribution: files there may come from strangers.
    """
    seen = {OWN}
    here = Path.cwd()
    for distribution in distributions(path=[folder for folder in sys.path if Path(folder).resolve() != here]):
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = distribution.metadata["Name"] or "without a name"
            entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as failure:  # noqa: BLE001 — others' metadata may be malformed in any way
            what = f"has metadata that cannot be read ({_describe(failure)}); reinstall it"
            _tell(f"in {distribution.locate_file('')}", what)
            continue
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key not in seen:
            seen.add(key)
            yield from ((name, entry) for entry in entries)


def _load(distribution: str, entry: EntryPoint) -> FrameworkModels | None:
    where = f"registers the framework {entry.name} as {entry.value}, which"
    try:
        found = entry.load()
    except (Exception, SystemExit) as failure:  # noqa: BLE001 — others' code may raise anything while it is imported
        _tell(distribution, f"{where} cannot be imported ({_describe(failure)}); mend or uninstall it")
        return None
    if not isinstance(found, FrameworkModels):
        _tell(distribution, f"{where} is {describe_value(found)}, and a Framework is expected; mend or uninstall it")
        return None
    return found


def _offers_of(one: Registered, provider: str, kind: type[Given]) -> tuple[Offer[Given], ...]:
    if one.is_own:
        return tuple(Offer(one, given) for given in getattr(one.framework, provider, tuple)())
    where = f"registers the framework {one.name}, whose {provider}"
    try:
        found = tuple(getattr(one.framework, provider, tuple)())
    except (Exception, SystemExit) as failure:  # noqa: BLE001 — as above
        _tell(one.distribution, f"{where} cannot be told ({_describe(failure)}); mend or uninstall it")
        return ()
    wrong = next((given for given in found if not isinstance(given, kind)), None)
    if wrong is not None:
        _tell(one.distribution, f"{where} hold {describe_value(wrong)}, and a {kind.__name__} is expected; mend it")
        return ()
    return tuple(Offer(one, given) for given in found)


def _knows(offer: Offer[Asked], thing: object) -> bool:
    if offer.of.is_own:
        return offer.given.is_one(thing)
    try:
        return bool(offer.given.is_one(thing))
    except PlannerError:  # it could not read the file, so the file is none of its own
        return False
    except Exception as failure:  # noqa: BLE001 — others' code may trip over anybody's file
        what = f"registers the framework {offer.of.name}, which fails on a file of others"
        _tell(offer.of.distribution, f"{what} ({_describe(failure)}); mend or uninstall it")
        return False


def _describe(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:300]


def _tell(distribution: str, what: str) -> None:
    sentence = f"distribution {distribution} {what}"
    if sentence not in _broken:
        _broken[sentence] = None
        warn([sentence])
