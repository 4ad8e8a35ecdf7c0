"""Which slot of a bounded cache a row has, and which rows leave their slots. On CPUs only.

A use is a number, such as that of a batch. Each row has a last use. If no slot is free, a new row
gets the slot of a row whose last use is over: the one with the earliest last use, among equals the
one with the lowest slot. So all that a map does follows from the calls. See README.md.
"""

from __future__ import annotations

from recpoint.kernels.slot_map import cpu
from recpoint.kernels.slot_map.taken import MOST_USE, Taken

__all__ = ["MOST_USE", "SlotMap", "Taken"]

SlotMap = cpu.SlotMap
