"""Platform: on what an operator was timed: device, versions of software, deterministic kernels or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from mm_autoparallel.model.profiles.store import stale_software

UNKNOWN = "unknown"
"""The version of software that nobody states, and how those begin that say why."""
CONSTANT = f"{UNKNOWN} (constant upstream)"
"""The version of software that an imported file states as a constant, whatever it was."""


@dataclass(frozen=True)
class Platform:
    """software: name → version. deterministic: kernels that give the same bits every time, which may be slower."""

    device: str
    software: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = False

    def __hash__(self) -> int:
        return hash((self.device, self.versions, self.deterministic))

    @property
    def versions(self) -> str:
        """The versions as they are kept, in one spelling."""
        return json.dumps(dict(sorted(self.software.items())))

    def __str__(self) -> str:
        told = ", ".join(f"{name} {version}" for name, version in sorted(self.software.items()))
        kernels = ", deterministic" if self.deterministic else ""
        return f"{self.device} ({told or 'no versions'}{kernels})"

    def holds_for(self, device: str, software: Mapping[str, str], deterministic: bool = False) -> bool:
        """Whether times from here hold there: the same device, and no version that both name differs in its first two
        numbers; a version that nobody knows holds nowhere."""
        unknown = any(version.startswith(UNKNOWN) for version in self.software.values())
        if self.device != device or self.deterministic != deterministic or unknown:
            return False
        return bool(set(self.software) & set(software)) and not stale_software(self.software, software)
