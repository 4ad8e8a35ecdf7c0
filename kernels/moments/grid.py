"""Constants of the grids of format §3.5, and which arguments have codes."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.kernels.arguments import require

__all__ = [
    "BASE_SHIFT",
    "LARGEST",
    "LEAST_SHIFT",
    "MOST_SHIFT",
    "MOST_STEPS",
    "CodedMoments",
    "require_codes",
    "require_moments",
    "require_places",
]

#: The bits of the largest value that has a code: 2^127. Rounding up from there gives no infinity.
LARGEST: Final = 0x7F000000
#: Steps of a grid are 2^LEAST_SHIFT … 2^MOST_SHIFT in the bits of a value.
LEAST_SHIFT: Final = 8
MOST_SHIFT: Final = 23
#: The base of a grid is a multiple of 2^BASE_SHIFT, or of its step if that is larger.
BASE_SHIFT: Final = 19
#: Most steps from the base to a row's greatest value: codes 1 … 255.
MOST_STEPS: Final = 254


class CodedMoments(NamedTuple):
    """Coded rows.

    Attributes:
        codes: u8 [n, m]; 0 is zero.
        grids: i16 [n]; the lower 12 bits are the base, the upper 4 the shift.
        refused: bool [n], the rows that have no codes.
    """

    codes: Tensor
    grids: Tensor
    refused: Tensor


def require_moments(rows: Tensor) -> None:
    """Refuse rows that are not f32 [n, m], contiguous, on the CPU.

    Raises:
        ValueError: names the argument, and what is expected.
    """
    require("rows", rows, torch.float32, 2)
    _require_on_cpu("rows", rows)


def require_codes(codes: Tensor, grids: Tensor) -> None:
    """Refuse codes that are not u8 [n, m], or grids that are not i16 [n].

    Raises:
        ValueError: names the argument, and what is expected.
    """
    require("codes", codes, torch.uint8, 2)
    require("grids", grids, torch.int16, 1)
    for name, tensor in (("codes", codes), ("grids", grids)):
        _require_on_cpu(name, tensor)
    if grids.numel() != codes.shape[0]:
        raise ValueError(f"grids: {grids.numel()}, expected one for each of {codes.shape[0]} rows")


def require_places(
    codes: Tensor, table: Tensor, ids: Tensor | None, positions: Tensor | None
) -> int:
    """Return how many rows are written; refuse places that do not fit.

    Raises:
        ValueError: names the argument, and what is expected.
    """
    require("table", table, torch.float32, 2)
    _require_on_cpu("table", table)
    if table.shape[1] != codes.shape[1]:
        raise ValueError(f"table: {table.shape[1]} values a row, expected {codes.shape[1]}")
    for name, places, bound in (("positions", positions, len(codes)), ("ids", ids, len(table))):
        if places is None:
            continue
        require(name, places, torch.int64, 1)
        _require_on_cpu(name, places)
        if places.numel() and not (0 <= int(places.min()) and int(places.max()) < bound):
            raise ValueError(f"{name}: outside 0 … {bound - 1}")
    count = len(codes) if positions is None else positions.numel()
    if (ids is None and count > len(table)) or (ids is not None and ids.numel() != count):
        room = len(table) if ids is None else ids.numel()
        raise ValueError(f"places for {room} rows, expected one for each of {count}")
    return count


def _require_on_cpu(name: str, tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise ValueError(f"{name}: device {tensor.device}, expected cpu")
