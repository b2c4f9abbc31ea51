"""Holds exported TOMLs against torchtitan 0.2 (torchtitan_parser.py has 0.3).

python tests/frameworks/torchtitan_0_2_parser.py --environment DIR [--plans 40] [--seed 1]
"""

from __future__ import annotations

import os
import sys
from functools import partial

from held_against import main
from torchtitan_parser import expect

if __name__ == "__main__":
    os.environ["TOML"] = "1"  # the probe's own words
    sys.exit(main("torchtitan", partial(expect, is_toml=True), version="0.2", read_back="plan.toml"))
