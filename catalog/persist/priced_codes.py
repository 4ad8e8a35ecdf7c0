"""Says with which codes rows are stored whose widths follow from the price of a bit.

Agents store such codes, and trainers measure what they cost. So the methods are fixed: nothing is
chosen on a sample that only one of the two has.
"""

from __future__ import annotations

from typing import Final

from recpoint.format.job import QuantizerName
from recpoint.kernels.quantize import ASYMMETRIC, Method

__all__ = ["RESIDUALS", "priced_method"]

#: Least squares without a grid: nearly as good at a fraction of the time (benchmarks.md).
_ROWS: Final = Method(name="refit", bins=0, refits=2)
#: Least squares shrink a row, which costs nothing; but a residual that shrinks lags behind its row,
#: and rows that lag do so in one direction. These are stretched again. Residuals of one width have
#: them, too.
RESIDUALS: Final = Method(name="level", refits=2)


def priced_method(quantizer: QuantizerName, *, residual: bool = False) -> Method | None:
    """Return the method of rows with widths of their own; None: it is chosen on a sample of them.

    Args:
        quantizer: the setting of their table.
        residual: whether they are residuals.
    """
    if quantizer == "auto":
        return RESIDUALS if residual else _ROWS
    return ASYMMETRIC if quantizer == "asymmetric" else None
