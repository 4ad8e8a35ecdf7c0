"""Which slot of a table a key has: a map from any int64 to slots 1, 2, …. On CPUs only.

Slot 0 stands for "no slot", so it is what a key without one gets. See README.md.
"""

from __future__ import annotations

from recpoint.kernels.key_map import cpu
from recpoint.kernels.key_map.shapes import MOST_SLOTS

__all__ = ["MOST_SLOTS", "KeyMap"]

KeyMap = cpu.KeyMap
