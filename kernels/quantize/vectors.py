"""Sixteen neighbouring values of one row at a time, for CPU kernels.

The end of a row is read under a mask, so that short rows and odd lengths cost no loop of their own.
See `lanes.py` for what such a vector is on a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from recpoint.kernels.intrinsics import machine_operation

__all__ = [
    "CODES_AT_ONCE",
    "Row",
    "coded",
    "codes_of_row",
    "ends_of_row",
    "everywhere",
    "half_bytes_of_row",
    "keys_of",
    "lane_ends",
    "packed_codes",
    "quarter_bytes_of_row",
]

#: Codes are written for whole vectors, with zeros behind a row's end.
CODES_AT_ONCE: Final = 16

_WORD, _FLOAT = ir.IntType(32), ir.FloatType()
_WORDS = ir.VectorType(_WORD, CODES_AT_ONCE)
_FLOATS = ir.VectorType(_FLOAT, CODES_AT_ONCE)
_BYTES = ir.VectorType(ir.IntType(8), CODES_AT_ONCE)
_BITS = ir.VectorType(ir.IntType(1), CODES_AT_ONCE)


def _splat(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * CODES_AT_ONCE)


def everywhere(builder: Any, value: Any) -> Any:
    """A binary32 in every lane."""
    return _everywhere(builder, _FLOATS, value)


def _everywhere(builder: Any, kind: ir.VectorType, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, one, _splat(_WORDS, 0))


class Row(NamedTuple):
    """A row's address and how many values it has, as values of the function that is built."""

    address: Any
    dim: Any


def _each_vector(
    builder: Any, kind: ir.VectorType, row: Row, rest: Any, visit: Callable[[Any, Any, Any], None]
) -> None:
    """Call `visit(vector, its first index, mask)` for all of a row; the mask is None when full."""
    address, dim = row
    cell = address.type
    width = ir.Constant(cell, CODES_AT_ONCE)

    def place(index: Any) -> Any:
        shift = builder.mul(index, ir.Constant(cell, 4))
        return builder.inttoptr(builder.add(address, shift), kind.as_pointer())

    full = builder.udiv(dim, width)
    with cgutils.for_range(builder, full) as loop:
        index = builder.mul(loop.index, width)
        visit(builder.load(place(index), align=4), index, None)
    index = builder.mul(full, width)
    left = builder.sub(dim, index)
    with builder.if_then(builder.icmp_unsigned(">", left, ir.Constant(cell, 0))):
        counts = ir.Constant(_WORDS, list(range(CODES_AT_ONCE)))
        limit = _everywhere(builder, _WORDS, builder.trunc(left, _WORD))
        mask = builder.icmp_unsigned("<", counts, limit)
        pointer = kind.as_pointer()
        kinds = ir.FunctionType(kind, [pointer, _WORD, _BITS, kind])
        name = "llvm.masked.load.v16f32.p0" if kind is _FLOATS else "llvm.masked.load.v16i32.p0"
        masked = builder.module.declare_intrinsic(name, (), kinds)
        found = builder.call(masked, [place(index), ir.Constant(_WORD, 4), mask, rest])
        visit(found, index, mask)


def keys_of(builder: Any, patterns: Any) -> Any:
    """Integer keys of binary32 patterns: see `plain.py`."""
    sign = builder.ashr(patterns, _splat(_WORDS, 31))
    return builder.xor(patterns, builder.and_(sign, _splat(_WORDS, 0x7FFFFFFF)))


def lane_ends(builder: Any, row: Row) -> tuple[Any, Any]:
    """The smallest and the largest keys of a row, one in each lane."""
    allocate: Any = cgutils.alloca_once
    low, high = allocate(builder, _WORDS), allocate(builder, _WORDS)
    ends = ((low, "<", 0x7FFFFFFF), (high, ">", -0x80000000))
    for found, _, none in ends:
        builder.store(_splat(_WORDS, none), found)  # each time, unlike what `alloca_once` can set

    def visit(patterns: Any, index: Any, mask: Any) -> None:
        keys = keys_of(builder, patterns)
        for found, order, none in ends:
            seen = builder.load(found)
            mine = keys if mask is None else builder.select(mask, keys, _splat(_WORDS, none))
            nearer = builder.icmp_signed(order, mine, seen)
            builder.store(builder.select(nearer, mine, seen), found)

    _each_vector(builder, _WORDS, row, _splat(_WORDS, 0), visit)
    return builder.load(low), builder.load(high)


@machine_operation
def ends_of_row(typingctx: Any, address: Any, dim: Any) -> Any:
    """The smallest and the largest integer key of `dim` binary32 values: see `plain.py`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORDS])
        ends = [
            builder.call(
                builder.module.declare_intrinsic(f"llvm.vector.reduce.{name}.v16i32", (), kind),
                [found],
            )
            for name, found in zip(
                ("smin", "smax"), lane_ends(builder, Row(*arguments)), strict=True
            )
        ]
        return context.make_tuple(builder, signature.return_type, ends)

    pair: Any = types.Tuple((types.int32, types.int32))  # type: ignore[no-untyped-call]
    return pair(types.intp, types.intp), build


def _codes_of_row(code_bits: int) -> Any:
    def operation(
        typingctx: Any, address: Any, dim: Any, inverse: Any, offset: Any, top: Any, to: Any
    ) -> Any:
        real = types.float32
        kinds = types.void(types.intp, types.intp, real, real, real, types.intp)
        return kinds, partial(_code_and_pack, code_bits)

    return machine_operation(operation)


def _code_and_pack(
    code_bits: int, context: Any, builder: Any, signature: Any, arguments: Any
) -> Any:
    source, dim, inverse, offset, top, to = arguments
    inverse, offset = (everywhere(builder, x) for x in (inverse, offset))

    def visit(values: Any, index: Any, mask: Any) -> None:
        codes = coded(builder, values, inverse, offset, top)
        if mask is not None:
            codes = builder.select(mask, codes, _splat(_WORDS, 0))
        packed = packed_codes(builder, codes, code_bits)
        shift = builder.udiv(builder.mul(index, index.type(code_bits)), index.type(8))
        target = builder.inttoptr(builder.add(to, shift), packed.type.as_pointer())
        builder.store(packed, target, align=1)

    _each_vector(builder, _FLOATS, Row(source, dim), _splat(_FLOATS, 0.0), visit)
    return context.get_dummy_value()


def coded(builder: Any, values: Any, inverse: Any, offset: Any, top: Any) -> Any:
    """Codes of sixteen values, as words; 0 whatever the value is where the inverse is 0.

    `inverse` and `offset` are vectors, `top` is one binary32.
    """
    top, zero = everywhere(builder, top), _splat(_FLOATS, 0.0)
    place = builder.fmul(builder.fsub(values, offset), inverse)
    place = builder.fadd(place, _splat(_FLOATS, 0.5))
    # In this order, so that NaN, which is not quantized, is code 0.
    place = builder.select(builder.fcmp_ordered(">", place, zero), place, zero)
    place = builder.select(builder.fcmp_ordered("<", place, top), place, top)
    # Not negative: dropping the fraction is floor.
    return builder.fptosi(place, _WORDS)


def packed_codes(builder: Any, codes: Any, code_bits: int) -> Any:
    """Codes that are sixteen words, each in `code_bits` bits, as 2 * code_bits bytes."""
    codes = builder.trunc(codes, _BYTES)
    together = 8 // code_bits  # codes in a byte
    if together == 1:
        return codes
    count = CODES_AT_ONCE // together
    kind = ir.VectorType(ir.IntType(8 * together), count)
    words = builder.bitcast(codes, kind)
    found = words
    for place in range(1, together):
        # Code `place` of a word starts at bit 8 * place, and belongs at bit code_bits * place.
        shift = ir.Constant(kind, [(8 - code_bits) * place] * count)
        found = builder.or_(found, builder.lshr(words, shift))
    return builder.trunc(found, ir.VectorType(ir.IntType(8), count))


codes_of_row = _codes_of_row(8)
half_bytes_of_row = _codes_of_row(4)
quarter_bytes_of_row = _codes_of_row(2)
