"""What a stage costs where the order is free: one row of figures for each way to fill it.

Kernels of this room take the rows of all stages as one array; the constants name its columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: [., NUM_FIGURES]: rows of figures, whose columns have units of their own.
Figures = NDArray[np.float64]

#: Milliseconds of one micro-batch, and of the hop to the next stage: forth after a forward, back before an input
#: gradient. TAIL: what follows a stage's last action.
FORWARD_MS, INPUT_MS, WEIGHT_MS, HOP_FORWARD_MS, HOP_BACKWARD_MS, TAIL_MS = 0, 1, 2, 3, 4, 5
#: Bytes that a micro-batch keeps from its forward until its input gradient has run, and from there until its weight
#: gradient has; and what both may come to.
KEPT, PENDING, ROOM = 6, 7, 8
#: How many micro-batches may have begun and not had their input gradient; their weight gradient; or wait for that
#: alone. Limits that follow from the bytes; the first also from the host's.
MOST_IN_FLIGHT, MOST_HELD, MOST_PENDING = 9, 10, 11
NUM_FIGURES = 12

#: The actions of a word, as their position among a micro-batch's own.
FORWARD, INPUT, WEIGHT = 0, 1, 2
NUM_KINDS = 3
