"""How a row's scale and offset are found: the methods of quantization and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from recpoint.kernels.bit_packing.widths import require_bits

__all__ = [
    "ASYMMETRIC",
    "MAX_BINS",
    "MAX_GRID",
    "MAX_REFITS",
    "SYMMETRIC",
    "WIDEST_STEP",
    "Method",
    "MethodName",
    "default_method",
]

MethodName = Literal["symmetric", "asymmetric", "greedy", "refit", "level"]

#: Limits that keep the time a row takes, and what a record may ask for, bounded.
MAX_BINS: Final = 1000
MAX_GRID: Final = 64
MAX_REFITS: Final = 100

#: Then errors have next to no part along the row.
_LEVELINGS: Final = 2

#: Parameters of binary16 may make a row's step larger by this factor; else the row is wide.
WIDEST_STEP: Final = 1.0 + 2.0**-6


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method and its parameters; 0 where it has none.

    All store the same form, codes with one scale and offset a row (format §3.2), so whoever decodes
    need not know which it was.

    symmetric: ends at -m and m, m being the largest magnitude. asymmetric: ends at the least and
    the largest value. greedy: the adaptive search of Check-N-Run (NSDI 2022). refit: a coarse grid
    of ends, a finer one around the best, then least squares; the default where a search pays. With
    0 bins it is least squares alone, two to six times as fast. level: the same without a grid, then
    codes are fitted to values: least squares shrink a row, and this stretches it back, for an
    error that is up to a seventh larger at 2 bits.

    Raises:
        ValueError: the method has no such parameter, or needs it, or it is out of bounds.
    """

    name: MethodName
    #: greedy: steps the range is cut into; refit: places tried for each end, 0 or 2 and more.
    bins: int = 0
    ratio_permille: int = 0  # greedy: most of the range that may be removed
    #: refit, level: how often codes are assigned anew and the parameters fitted to them.
    refits: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "symmetric": ((0, 0), (0, 0), (0, 0)),
            "asymmetric": ((0, 0), (0, 0), (0, 0)),
            "greedy": ((1, MAX_BINS), (1, 1000), (0, 0)),
            "refit": ((0, MAX_GRID), (0, 0), (0, MAX_REFITS)),
            "level": ((0, 0), (0, 0), (0, MAX_REFITS)),
        }
        if self.name not in bounds:
            raise ValueError(f"method: {self.name!r}, expected one of {', '.join(bounds)}")
        if self.name == "refit" and self.bins == 1:
            raise ValueError("bins: 1 for refit, expected 0 (no grid) or 2 and more")
        fields = ("bins", "ratio_permille", "refits")
        for field, (low, high) in zip(fields, bounds[self.name], strict=True):
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{field}: {value!r} for {self.name}, expected {low} to {high}")

    @property
    def searches(self) -> bool:
        """Whether it looks for better parameters than the row's ends give."""
        return self.name == "greedy" or self.fits

    @property
    def fits(self) -> bool:
        """Whether it fits parameters to codes by least squares."""
        return self.name in ("refit", "level")

    @property
    def levelings(self) -> int:
        """How often codes are fitted to values at the end."""
        return _LEVELINGS if self.name == "level" else 0


SYMMETRIC: Final = Method(name="symmetric")
ASYMMETRIC: Final = Method(name="asymmetric")

#: At 8 bits a search gains next to nothing.
_DEFAULTS: Final = {
    2: Method(name="refit", bins=5, refits=2),
    3: Method(name="refit", bins=6, refits=3),
    4: Method(name="refit", bins=10, refits=3),
    5: Method(name="refit", bins=10, refits=3),
    6: Method(name="refit", bins=10, refits=3),
    8: ASYMMETRIC,
}


def default_method(bits: int) -> Method:
    """What to quantize with where nothing was chosen for a table.

    Raises:
        ValueError: bits is not one of `BITS`.
    """
    require_bits(bits)
    return _DEFAULTS[bits]
