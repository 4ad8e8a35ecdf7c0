"""Sixteen rows at a time, for what is done once a row: on short rows it takes longer than the rest.

The ends of one row are found across the lanes of a vector, and each step of that leaves half the
lanes idle. Here each step joins two vectors, so that after the last one a lane holds a row. Rows of
4 and of 8 values lie several in a vector from the start, and are coded that way as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from recpoint.kernels.intrinsics import ask_for, machine_operation
from recpoint.kernels.quantize.vectors import (
    CODES_AT_ONCE,
    Row,
    coded,
    everywhere,
    keys_of,
    lane_ends,
    packed_codes,
)

__all__ = ["ROWS", "ends_of_block", "fits_block", "parameters_of_block", "write_block"]

ROWS: Final = CODES_AT_ONCE

#: Rows of which whole ones fill a vector; 16 such rows fill as many vectors as a row has values.
_SHORT_DIMS: Final = (4, 8, 16)
#: Longer rows, of lengths that tables have, for which loops are compiled whose length is known.
_USUAL_DIMS: Final = (32, 64, 128)

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()
_WORDS = ir.VectorType(_WORD, ROWS)
_FLOATS = ir.VectorType(_FLOAT, ROWS)
_ORDERS: Final = ("<", ">")

_Ends = tuple[Any, Any]  # of the lanes: lowest keys, highest keys


def fits_block(dim: int, code_bits: int) -> bool:
    """Whether `write_block` can write rows of `dim` values in codes of that width."""
    return code_bits in (2, 4, 8) and (dim in _SHORT_DIMS or dim % ROWS == 0)


@machine_operation
def ends_of_block(typingctx: Any, rows: Any, dim: Any, lows: Any, highs: Any) -> Any:
    """Write the smallest and the largest integer key of 16 neighbouring rows: see `plain.py`.

    Arguments: addresses of the first value, values a row, addresses of 16 int32 each.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, dim, *targets = arguments
        for short in _SHORT_DIMS:
            with _if_equal(builder, dim, short):
                keys = (
                    keys_of(builder, _vector(builder, rows, _WORDS, number))
                    for number in range(short)
                )
                _store_ends(builder, [(key, key) for key in keys], short, targets)
        for long in _USUAL_DIMS:
            with _if_equal(builder, dim, long):
                each = _ends_of_each(builder, rows, dim.type(long))
                _store_ends(builder, each, ROWS, targets)
        with _if_none(builder, dim, _SHORT_DIMS + _USUAL_DIMS):
            _store_ends(builder, _ends_of_each(builder, rows, dim), ROWS, targets)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), build


def _ends_of_each(builder: Any, rows: Any, dim: Any) -> list[_Ends]:
    """Ends of the lanes of each of 16 rows of any length."""
    allocate: Any = cgutils.alloca_once
    room = [allocate(builder, ir.ArrayType(_WORDS, ROWS)) for _ in _ORDERS]
    line, none = builder.mul(dim, dim.type(4)), ir.Constant(_WORD, 0)
    with cgutils.for_range(builder, dim.type(ROWS)) as loop:
        row = Row(builder.add(rows, builder.mul(loop.index, line)), dim)
        for found, kept in zip(lane_ends(builder, row), room, strict=True):
            builder.store(found, builder.gep(kept, [none, builder.trunc(loop.index, _WORD)]))

    def ends(kept: Any, row: int) -> Any:
        return builder.load(builder.gep(kept, [none, ir.Constant(_WORD, row)]))

    return [(ends(room[0], row), ends(room[1], row)) for row in range(ROWS)]


def _store_ends(builder: Any, ends: Sequence[_Ends], parts: int, targets: Sequence[Any]) -> None:
    """Join vectors in which `parts` lanes belong to a row until each lane is a row; store those."""
    while len(ends) > 1:
        ends = [
            (
                _joined(builder, "<", one[0], other[0], parts),
                _joined(builder, ">", one[1], other[1], parts),
            )
            for one, other in zip(ends[::2], ends[1::2], strict=True)
        ]
        parts //= 2
    for found, target in zip(ends[0], targets, strict=True):
        builder.store(found, builder.inttoptr(target, _WORDS.as_pointer()), align=4)


def _joined(builder: Any, order: str, left: Any, right: Any, parts: int) -> Any:
    """Ends of the rows of two vectors as one vector, in which half as many lanes are a row's."""
    half = parts // 2
    lanes = [row * parts + lane for row in range(2 * ROWS // parts) for lane in range(half)]
    near, far = (
        builder.shuffle_vector(left, right, ir.Constant(_WORDS, [lane + shift for lane in lanes]))
        for shift in (0, half)
    )
    return builder.select(builder.icmp_signed(order, near, far), near, far)


@machine_operation
def parameters_of_block(
    typingctx: Any, lows: Any, highs: Any, levels: Any, scales: Any, offsets: Any, inverses: Any,
    exacts: Any,
) -> Any:  # fmt: skip
    """Write what `plain_parameters` gives for 16 rows with these keys, and the inverse scales.

    For asymmetric parameters of binary32, of which none is wide. An inverse is 0 where a scale is.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lows, highs, levels, *targets = arguments
        low_key, high_key = (_vector(builder, keys, _WORDS, 0) for keys in (lows, highs))
        low, high = (builder.bitcast(keys_of(builder, key), _FLOATS) for key in (low_key, high_key))
        compare, both = builder.fcmp_ordered, builder.and_
        finite = both(
            builder.icmp_signed(">", low_key, _same(_WORDS, -0x7F800001)),
            builder.icmp_signed("<", high_key, _same(_WORDS, 0x7F800000)),
        )
        levels = everywhere(builder, levels)
        span = builder.fsub(high, low)
        smallest = builder.fmul(levels, _same(_FLOATS, 2.0**-126))
        spread = both(compare(">=", span, smallest), compare("<=", span, _same(_FLOATS, 2.0**126)))
        # Rows of zeros with a -0 among them, whose key is -1, have to keep its sign.
        positive = builder.icmp_signed("!=", low_key, _same(_WORDS, -1))
        # Keys, not numbers: see `plain.py`.
        constant = both(builder.icmp_signed("==", low_key, high_key), positive)
        quantized, kept = both(finite, spread), both(finite, builder.or_(constant, spread))
        none = _same(_FLOATS, 0.0)
        scale = builder.select(quantized, builder.fdiv(span, levels), none)
        inverse = builder.select(quantized, builder.fdiv(_same(_FLOATS, 1.0), scale), none)
        offset = builder.select(kept, low, none)
        exact = builder.zext(builder.not_(kept), ir.VectorType(ir.IntType(8), ROWS))
        for found, target in zip((scale, offset, inverse, exact), targets, strict=True):
            builder.store(found, builder.inttoptr(target, found.type.as_pointer()), align=1)
        return context.get_dummy_value()

    cell = types.intp
    return types.void(cell, cell, types.float32, cell, cell, cell, cell), build


@machine_operation
def write_block(
    typingctx: Any, rows: Any, dim: Any, code_bits: Any, inverses: Any, offsets: Any, top: Any,
    to: Any,
) -> Any:  # fmt: skip
    """Write the packed codes of 16 neighbouring rows for which `fits_block`.

    Arguments: address of the first value, values a row, width of a code as it is stored, addresses
    of 16 inverse scales (0 for a row whose codes are zeros) and of 16 offsets, the highest code,
    address of the first packed row.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, dim, code_bits, inverses, offsets, top, to = arguments
        parameters = inverses, offsets, top
        for bits in (2, 4, 8):
            with _if_equal(builder, code_bits, bits):
                for short in _SHORT_DIMS:
                    with _if_equal(builder, dim, short):
                        _code_short_rows(builder, rows, short, bits, parameters, to)
                for long in _USUAL_DIMS:
                    with _if_equal(builder, dim, long):
                        _code_long_rows(builder, rows, dim.type(long), bits, parameters, to)
                with _if_none(builder, dim, _SHORT_DIMS + _USUAL_DIMS):
                    _code_long_rows(builder, rows, dim, bits, parameters, to)
        return context.get_dummy_value()

    cell = types.intp
    return types.void(cell, cell, cell, cell, cell, types.float32, cell), build


def _code_short_rows(
    builder: Any, rows: Any, dim: int, bits: int, parameters: Sequence[Any], to: Any
) -> None:
    *addresses, top = parameters
    of_rows = [_vector(builder, address, _FLOATS, 0) for address in addresses]
    for number in range(dim):
        row_of_lane = ir.Constant(_WORDS, [(number * ROWS + lane) // dim for lane in range(ROWS)])
        inverse, offset = (builder.shuffle_vector(of, of, row_of_lane) for of in of_rows)
        values = _vector(builder, rows, _FLOATS, number)
        codes = packed_codes(builder, coded(builder, values, inverse, offset, top), bits)
        _store_codes(builder, codes, to, to.type(number), bits)


def _code_long_rows(
    builder: Any, rows: Any, dim: Any, bits: int, parameters: Sequence[Any], to: Any
) -> None:
    *addresses, top = parameters
    vectors = builder.udiv(dim, dim.type(ROWS))
    of_block = builder.mul(vectors, dim.type(ROWS))
    with cgutils.for_range(builder, dim.type(ROWS)) as row:
        inverse, offset = (
            everywhere(builder, builder.load(_place(builder, address, _FLOAT, row.index, 4)))
            for address in addresses
        )
        first = builder.mul(row.index, vectors)
        with cgutils.for_range(builder, vectors) as column:
            number = builder.add(first, column.index)
            place = _place(builder, rows, _FLOATS, number, 4 * ROWS)
            # The next block's ends are found before its codes: all its lines would be waited for.
            ask_for(builder, builder.gep(place, [of_block]))
            values = builder.load(place, align=4)
            codes = packed_codes(builder, coded(builder, values, inverse, offset, top), bits)
            _store_codes(builder, codes, to, number, bits)


def _store_codes(builder: Any, codes: Any, to: Any, number: Any, bits: int) -> None:
    place = _place(builder, to, codes.type, number, ROWS * bits // 8)
    builder.store(codes, place, align=1)


def _vector(builder: Any, address: Any, kind: ir.VectorType, number: int) -> Any:
    place = _place(builder, address, kind, address.type(number), 4 * ROWS)
    return builder.load(place, align=4)


def _place(builder: Any, address: Any, kind: Any, number: Any, step: int) -> Any:
    shift = builder.mul(number, number.type(step))
    return builder.inttoptr(builder.add(address, shift), kind.as_pointer())


def _same(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * ROWS)


def _is(builder: Any, value: Any, number: int) -> Any:
    return builder.icmp_unsigned("==", value, value.type(number))


@contextmanager
def _if_equal(builder: Any, value: Any, number: int) -> Iterator[None]:
    with builder.if_then(_is(builder, value, number)):
        yield


@contextmanager
def _if_none(builder: Any, value: Any, numbers: Sequence[int]) -> Iterator[None]:
    other = ir.Constant(ir.IntType(1), 1)
    for number in numbers:
        other = builder.and_(other, builder.not_(_is(builder, value, number)))
    with builder.if_then(other):
        yield
