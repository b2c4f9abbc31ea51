"""Lets the tests of this room, and the processes they start, import the toy model that lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
