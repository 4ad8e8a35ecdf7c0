"""What the quantizing kernels share: loading rows, their ends, plain parameters, storing codes.

Division is `div_rn`, since the plain operator is an approximation on a GPU, and kernels are built
without fusing multiply and add. Minimum and maximum use the integer keys that `plain.py` describes.
"""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from recpoint.kernels.quantize.method import WIDEST_STEP

__all__ = [
    "find_rows",
    "load",
    "load_parts",
    "parameters",
    "row_ends",
    "store_codes",
    "store_parameters",
    "store_parts",
]

_LARGE = tl.constexpr(2.0**126)
_LARGEST_HALF = tl.constexpr(65504.0)
_WIDEST_STEP = tl.constexpr(WIDEST_STEP)


@triton.jit
def _magnitude_up(magnitude):
    """The smallest values of binary16 that are not below magnitudes, as `binary16.py` has it."""
    pattern = magnitude.to(tl.int32, bitcast=True)
    normal = ((pattern + 0x1FFF) & ~0x1FFF).to(tl.float32, bitcast=True)
    units = tl.where(magnitude >= 6.103515625e-05, 0.0, magnitude) * 16777216.0
    whole = units.to(tl.int32).to(tl.float32)
    whole = tl.where(whole < units, whole + 1.0, whole)
    return tl.where(magnitude >= 6.103515625e-05, normal, whole * 5.960464477539063e-08)


@triton.jit
def _magnitude_down(magnitude):
    """The largest values of binary16 that are not above magnitudes."""
    pattern = magnitude.to(tl.int32, bitcast=True)
    normal = (pattern & ~0x1FFF).to(tl.float32, bitcast=True)
    units = tl.where(magnitude >= 6.103515625e-05, 0.0, magnitude) * 16777216.0
    whole = units.to(tl.int32).to(tl.float32)
    return tl.where(magnitude >= 6.103515625e-05, normal, whole * 5.960464477539063e-08)


@triton.jit
def _half_down(value):
    """The largest values of binary16 that are not above `value`; -0 stays -0."""
    below = tl.where(value > 0.0, _magnitude_down(value), -_magnitude_up(-value))
    return tl.where(value == 0.0, value, below)


@triton.jit
def _key(x):
    """Integers that order binary32 values as numbers, -0 below +0."""
    pattern = x.to(tl.int32, bitcast=True)
    return pattern ^ ((pattern >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def parameters(
    low_key, high_key, LEVELS: tl.constexpr, SYMMETRIC: tl.constexpr, HALF: tl.constexpr
):
    """Scale, offset, exact and wide of rows with these ends; scale 0 for rows without codes."""
    finite = (low_key > -0x7F800001) & (high_key < 0x7F800000)
    low = tl.where(finite, _value(low_key), 0.0)
    high = tl.where(finite, _value(high_key), 0.0)
    constant = (low == high) & (low_key != -1)
    spread = (high - low >= LEVELS * 2.0**-126) & (high - low <= _LARGE)
    if SYMMETRIC:
        largest = tl.where(-low > high, -low, high)
        high = tl.where(spread, largest, high)
        low = tl.where(spread, -largest, low)
        spread = spread & (high - low <= _LARGE)
    quantized = finite & spread
    exact = (finite & (constant | spread)) == 0
    levels = tl.full(low.shape, LEVELS, tl.float32)
    # A divisor of one and a dividend of zero where there is nothing to divide.
    scale = tl.div_rn(tl.where(quantized, high - low, 0.0), levels)
    offset = tl.where(exact, 0.0, low)
    wide = exact & (exact == 0)
    if HALF:
        half_offset = _half_down(offset)
        span = tl.where(quantized, high - half_offset, 0.0)
        half_scale = _magnitude_up(tl.div_rn(span, levels))
        fits = (half_scale <= scale * _WIDEST_STEP) & (half_scale <= _LARGEST_HALF)
        fits = fits & (tl.abs(half_offset) <= _LARGEST_HALF)
        fits = fits & (quantized | (half_offset == offset))
        scale = tl.where(fits, half_scale, scale)
        offset = tl.where(fits, half_offset, offset)
        wide = fits == 0
    return scale, offset, exact, wide


@triton.jit
def load(table, index, has_row, start, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns start … start + COLUMNS - 1 of the rows that are there; zeros for all else."""
    column = start + tl.arange(0, COLUMNS)
    mask = has_row[:, None] & (column < DIM)[None, :]
    x = tl.load(table + index[:, None] * DIM + column[None, :], mask=mask, other=0)
    if table.dtype.element_ty == tl.int16:
        # The pattern of a bf16 is the upper half of that of the same value in binary32.
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def load_parts(
    table, index, has_row, start, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """PARTS tensors of PART columns side by side; fewer than four are repeated.

    A row then has fewer threads, each with more of its values, and what is done once a row is done
    by fewer of them.
    """
    a = load(table, index, has_row, start, DIM, PART)
    b, c, d = a, a, a
    if PARTS >= 2:
        b = load(table, index, has_row, start + PART, DIM, PART)
    if PARTS == 4:
        c = load(table, index, has_row, start + 2 * PART, DIM, PART)
        d = load(table, index, has_row, start + 3 * PART, DIM, PART)
    return a, b, c, d


@triton.jit
def _low_keys(x, start, DIM: tl.constexpr, PART: tl.constexpr):
    return tl.where((start + tl.arange(0, PART) < DIM)[None, :], _key(x), 0x7FFFFFFF)


@triton.jit
def _high_keys(x, start, DIM: tl.constexpr, PART: tl.constexpr):
    return tl.where((start + tl.arange(0, PART) < DIM)[None, :], _key(x), -0x80000000)


@triton.jit
def row_ends(a, b, c, d, start, DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """The smallest and the largest key of each row in these columns."""
    low = _low_keys(a, start, DIM, PART)
    high = _high_keys(a, start, DIM, PART)
    if PARTS >= 2:
        low = tl.minimum(low, _low_keys(b, start + PART, DIM, PART))
        high = tl.maximum(high, _high_keys(b, start + PART, DIM, PART))
    if PARTS == 4:
        low = tl.minimum(low, _low_keys(c, start + 2 * PART, DIM, PART))
        high = tl.maximum(high, _high_keys(c, start + 2 * PART, DIM, PART))
        low = tl.minimum(low, _low_keys(d, start + 3 * PART, DIM, PART))
        high = tl.maximum(high, _high_keys(d, start + 3 * PART, DIM, PART))
    return tl.min(low, axis=1), tl.max(high, axis=1)


@triton.jit
def store_codes(
    x, scale, offset, inverse, row, in_block, start, DIM: tl.constexpr, LEVELS: tl.constexpr,
    CODE_BITS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the codes of columns start … start + COLUMNS - 1, CODE_BITS bits each.

    `row` points to the rows' first bytes, or pairs of bytes.
    """
    WIDTH: tl.constexpr = (DIM * CODE_BITS + 7) // 8
    column = start + tl.arange(0, COLUMNS)
    live = (scale > 0.0)[:, None] & (column < DIM)[None, :]
    difference = tl.where(live, x - offset[:, None], 0.0)
    steps = difference * inverse[:, None]
    # Not negative, so dropping the fraction is floor.
    code = tl.minimum(tl.maximum(steps + 0.5, 0.0), LEVELS * 1.0).to(tl.int32)
    if CODE_BITS == 8:
        mask = in_block[:, None] & (column < DIM)[None, :]
        tl.store(row[:, None] + column[None, :], code.to(tl.uint8), mask=mask)
    else:
        # Eight codes of b bits fill b bytes; four do where that is a whole number.
        GROUP: tl.constexpr = 4 if CODE_BITS % 2 == 0 else 8
        BYTES: tl.constexpr = GROUP * CODE_BITS // 8
        WORD: tl.constexpr = tl.uint32 if BYTES <= 4 else tl.uint64
        parts = tl.reshape(code.to(WORD), [code.shape[0], COLUMNS // GROUP, GROUP])
        shift = (tl.arange(0, GROUP) * CODE_BITS).to(WORD)
        # Their bits do not overlap: the sum is the word that holds all of them.
        word = tl.sum(parts << shift[None, None, :], axis=2)
        group = start // GROUP + tl.arange(0, COLUMNS // GROUP)
        if PAIRS:
            mask = in_block[:, None] & (group * BYTES < WIDTH)[None, :]
            tl.store(row[:, None] + group[None, :], word.to(tl.int16), mask=mask)
        else:
            for number in tl.static_range(BYTES):
                byte = group * BYTES + number
                mask = in_block[:, None] & (byte < WIDTH)[None, :]
                tl.store(row[:, None] + byte[None, :], (word >> (8 * number)).to(tl.uint8), mask)


@triton.jit
def store_parts(
    a, b, c, d, scale, offset, inverse, row, in_block, start, DIM: tl.constexpr,
    LEVELS: tl.constexpr, CODE_BITS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """`store_codes` for what `load_parts` loaded."""
    store_codes(
        a, scale, offset, inverse, row, in_block, start, DIM, LEVELS, CODE_BITS, PAIRS, PART
    )
    if PARTS >= 2:
        store_codes(
            b, scale, offset, inverse, row, in_block, start + PART, DIM, LEVELS, CODE_BITS, PAIRS,
            PART,
        )  # fmt: skip
    if PARTS == 4:
        store_codes(
            c, scale, offset, inverse, row, in_block, start + 2 * PART, DIM, LEVELS, CODE_BITS,
            PAIRS, PART,
        )  # fmt: skip
        store_codes(
            d, scale, offset, inverse, row, in_block, start + 3 * PART, DIM, LEVELS, CODE_BITS,
            PAIRS, PART,
        )  # fmt: skip


@triton.jit
def store_parameters(scale, offset, exact, wide, scales, offsets, exacts, wides, i, in_block):
    """Write the rows' parameters; the inverse of the scale, 1 where there is none."""
    tl.store(scales + i, scale, mask=in_block)
    tl.store(offsets + i, offset, mask=in_block)
    tl.store(exacts + i, exact.to(tl.uint8), mask=in_block)
    tl.store(wides + i, wide.to(tl.uint8), mask=in_block)
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale > 0.0, scale, 1.0))


@triton.jit
def find_rows(ids, n, limit, HAS_IDS: tl.constexpr, ROWS: tl.constexpr):
    """Numbers of this program's rows, which of them there are, where they lie, which are found."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_block = i < n
    index = i
    if HAS_IDS:
        index = tl.load(ids + i, mask=in_block, other=-1)
    has_row = in_block & (index >= 0) & (index < limit)
    return i, in_block, tl.where(has_row, index, 0), has_row
