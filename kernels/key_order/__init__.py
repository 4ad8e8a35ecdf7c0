"""Which rows of a keyed table leave next: the least by their uses, and then by key. On CPUs only.

See README.md.
"""

from __future__ import annotations

from recpoint.kernels.key_order import cpu

__all__ = ["KeyOrder"]

KeyOrder = cpu.KeyOrder
