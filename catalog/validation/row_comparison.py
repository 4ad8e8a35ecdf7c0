"""Whether decoded rows are those that were stored, as near as their scheme promises (format §10).

What is derived here holds for whatever method found scale and offset, since all take the code next
to a value; and a search's squared error is at most that of the formula (format §3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.chunks.row_state import to_bfloat16
from recpoint.format.manifest import TableSpec
from recpoint.kernels import quantize

__all__ = ["Compared", "DecodedRows", "Difference", "ExactRows", "compare"]

#: Eight roundings of binary32: those of the quotient, the code and the decoded value (README of
#: kernels/quantize), twice over.
_ROUNDINGS: Final = 8 * 2.0**-24
#: Half a unit in the last place of a table's dtype, of the value and at least.
_HALF_UNITS: Final = {"F16": (2.0**-11, 2.0**-25), "BF16": (2.0**-8, 2.0**-134)}
#: What adding up squares in binary64 may cost.
_SUMS: Final = 1e-6


class ExactRows(NamedTuple):
    """Rows as a trainer had them: values [n, dim] of the table's dtype, row states [n, …]."""

    values: Tensor
    row_states: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class DecodedRows:
    """Rows as a chunk gives them.

    Attributes:
        values: decoded, [n, dim], of the table's dtype.
        row_states: decoded, [n, …] each, of the table's dtypes.
        bits: of a code; of a value where there are no codes.
        scale: f32 [n]; None: the rows are stored exactly.
        offset: f32 [n], or None.
        symmetric: whether their method may have been that one, whose error is larger.
        narrow: for each row state, whether it is stored as BF16.
    """

    values: Tensor
    row_states: tuple[Tensor, ...]
    bits: int
    scale: Tensor | None
    offset: Tensor | None
    symmetric: bool
    narrow: tuple[bool, ...]

    def __getitem__(self, at: Tensor) -> DecodedRows:
        """The rows at positions `at`."""
        return DecodedRows(
            values=self.values[at],
            row_states=tuple(state[at] for state in self.row_states),
            bits=self.bits,
            scale=None if self.scale is None else self.scale[at],
            offset=None if self.offset is None else self.offset[at],
            symmetric=self.symmetric,
            narrow=self.narrow,
        )


class Difference(NamedTuple):
    """A row whose decoded contents are not within the bound; `position` among those compared."""

    position: int
    what: str
    found: str
    expected: str
    bound: str


class Compared(NamedTuple):
    """The outcome: what differs, and the largest error as a part of its bound."""

    differences: list[Difference]
    worst: float


def compare(spec: TableSpec, exact: ExactRows, stored: DecodedRows) -> Compared:
    """Compare n rows with what is stored of them."""
    if stored.scale is None or stored.offset is None:
        values = Compared(_bits_differ("values", exact.values, stored.values), 0.0)
    else:
        values = _quantized(spec, exact.values, stored, stored.scale, stored.offset)
    differences = list(values.differences)
    states = zip(spec.row_states, exact.row_states, stored.row_states, stored.narrow, strict=True)
    for state, there, found, narrow in states:
        what = f"row state {state.name}"
        # Rounding is fixed (format §3.5), so that what it gives is known to the bit.
        expected = to_bfloat16(there).to(there.dtype) if narrow else there
        differences += _bits_differ(what, expected, found, any_nan=narrow)
    return Compared(differences, values.worst)


def _quantized(
    spec: TableSpec, values: Tensor, stored: DecodedRows, scale: Tensor, offset: Tensor
) -> Compared:
    x, decoded = values.double(), stored.values.double()
    step, low = scale.double()[:, None], offset.double()[:, None]
    span = step * (2**stored.bits - 1)
    # The code next to a value: half a step off, or at an end where the value lies beyond it.
    beyond = torch.maximum(low - x, x - (low + span)).clamp(min=0.0)
    slack = _ROUNDINGS * torch.maximum(torch.maximum(x.abs(), low.abs()), span)
    if spec.dtype in _HALF_UNITS:
        relative, least = _HALF_UNITS[spec.dtype]
        slack = slack + (relative * 1.01 * decoded.abs()).clamp(min=least)
    bound = torch.maximum(step / 2, beyond) + slack
    error = (decoded - x).abs()
    differences = [
        _value_difference(int(row), values, stored.values, error, bound)
        for row in torch.nonzero(~(error <= bound).all(dim=1)).flatten()
    ]
    # A constant row has no codes that could be off, and comes back bit for bit.
    constant = torch.nonzero(scale == 0).flatten()
    for difference in _bits_differ("values", values[constant], stored.values[constant]):
        differences.append(difference._replace(position=int(constant[difference.position])))
    of_rows = error.square().sum(dim=1).sqrt()
    most = _plain_error(values, stored) * (1 + _SUMS) + slack.square().sum(dim=1).sqrt()
    for row in torch.nonzero(of_rows > most).flatten().tolist():
        differences.append(
            Difference(
                row,
                "values",
                f"a root of squared errors of {float(of_rows[row]):.9g}",
                "at most that of the formula in format §3.2",
                f"{float(most[row]):.9g}",
            )
        )
    finite = error / bound.clamp(min=torch.finfo(torch.float64).tiny)
    worst = float(finite.nan_to_num(nan=torch.inf).max()) if finite.numel() else 0.0
    one_each = {difference.position: difference for difference in reversed(differences)}
    return Compared([one_each[row] for row in sorted(one_each)], worst)


def _plain_error(values: Tensor, stored: DecodedRows) -> Tensor:
    """f64 [n]: root of the squared errors that the formula makes; infinite where it has no codes.

    A row that was restored from codes and not trained since is such a one, now and then.
    """
    rows = values.to(torch.float32).contiguous()
    methods = [quantize.ASYMMETRIC] + ([quantize.SYMMETRIC] if stored.symmetric else [])
    worst = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
    for method in methods:
        for half in (False, True):  # as parameters may be stored
            packed, scale, offset, refused, _ = quantize.quantize_packed(
                rows, stored.bits, method, half_parameters=half
            )
            decoded = quantize.dequantize_packed(
                packed, scale, offset, dim=rows.shape[1], bits=stored.bits
            )
            error = (decoded.double() - rows.double()).square().sum(dim=1).sqrt()
            worst = torch.maximum(worst, error.masked_fill(refused, torch.inf))
    return worst


def _value_difference(
    row: int, values: Tensor, decoded: Tensor, error: Tensor, bound: Tensor
) -> Difference:
    excess = (error[row] - bound[row]).nan_to_num(nan=torch.inf)
    at = int(excess.argmax())
    found, expected = float(decoded[row, at]), float(values[row, at])
    limit = float(bound[row, at])
    return Difference(row, f"values[{at}]", f"{found:.9g}", f"{expected:.9g}", f"{limit:.9g}")


def _bits_differ(
    what: str, expected: Tensor, found: Tensor, *, any_nan: bool = False
) -> list[Difference]:
    """Rows whose bits are not the same; with `any_nan` one NaN is as good as another."""
    n = len(expected)
    if n == 0:
        return []
    flat_found, flat_expected = found.reshape(n, -1), expected.reshape(n, -1)
    same = (_raw(flat_found) == _raw(flat_expected)).reshape(n, flat_found.shape[1], -1).all(dim=2)
    if any_nan:
        same |= flat_found.isnan() & flat_expected.isnan()
    differences = []
    for row in torch.nonzero(~same.all(dim=1)).flatten().tolist():
        at = int((~same[row]).nonzero()[0])
        index = f"[{at}]" if flat_found.shape[1] > 1 else ""
        texts = (_text(flat_found[row, at]), _text(flat_expected[row, at]))
        differences.append(Difference(row, what + index, *texts, ""))
    return differences


def _raw(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _text(value: Tensor) -> str:
    """A number, and its bits where two that are written alike may differ."""
    if not value.is_floating_point():
        return str(value.item())
    return f"{float(value):.9g} ({bytes(reversed(_raw(value.reshape(1)).tolist())).hex()})"
