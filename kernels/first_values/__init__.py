"""First values of rows, from a hash of key, row and column. On CPUs only. See README.md."""

from __future__ import annotations

from recpoint.kernels.first_values import cpu

__all__ = ["uniform_values"]

uniform_values = cpu.uniform_values
