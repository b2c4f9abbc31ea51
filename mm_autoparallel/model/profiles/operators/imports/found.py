"""Found: what one file of others told, ready to be added to a base, and what of it was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_autoparallel.model.profiles.operators.base import OperatorBase, Sampled
from mm_autoparallel.model.profiles.operators.platform import Platform


@dataclass(frozen=True)
class Found:
    """samples: by the platform that they are of. num_rows: of the file. num_distinct: operators among them that differ
    in type, in shapes and types of inputs or in shapes of outputs, collectives too. total_us: of all rows. notes: a
    sentence for each thing that was left out or assumed. collectives: what collective operations took, where the file
    is of those."""

    path: Path
    samples: Mapping[Platform, list[Sampled]] = field(default_factory=dict)
    num_rows: int = 0
    num_distinct: int = 0
    total_us: float = 0.0
    notes: tuple[str, ...] = ()
    collectives: tuple[Mapping[str, Any], ...] = ()

    @property
    def num_forms(self) -> int:
        """What a base gains, at most."""
        return sum(len(found) for found in self.samples.values())

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        sizes = {"rows": self.num_rows, "distinct": self.num_distinct, "forms": self.num_forms}
        document = {"path": str(self.path), **sizes, "total_us": round(self.total_us, 3), "notes": list(self.notes)}
        return document | ({"collectives": [dict(one) for one in self.collectives]} if self.collectives else {})

    def add_to(self, base: OperatorBase) -> None:
        """Keeps the samples as imported ones. Raises ProfileError where the base cannot be written."""
        for platform, samples in self.samples.items():
            base.add(platform, "imported", samples)
