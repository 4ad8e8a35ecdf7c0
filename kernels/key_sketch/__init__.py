"""How often keys were seen, in bounded memory: a count-min sketch. On CPUs only. See README.md."""

from __future__ import annotations

from recpoint.kernels.key_sketch import cpu
from recpoint.kernels.key_sketch.shapes import DEPTH, MOST_COUNT

__all__ = ["DEPTH", "MOST_COUNT", "KeySketch"]

KeySketch = cpu.KeySketch
