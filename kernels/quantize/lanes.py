"""Sixteen binary32 values side by side, one for each of sixteen rows, for CPU kernels.

A search does the same to every row, and all its steps depend on sums over a row. LLVM does not
vectorize such sums without fast-math, because their order would change; with a row in each lane it
does not have to. These are LLVM's vectors: sixteen lanes are one register with AVX-512, two with
AVX2, four with SSE or NEON. Each operation rounds once, as its scalar form does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import models, overload, register_model

from recpoint.kernels.intrinsics import machine_operation

__all__ = [
    "LANES",
    "both",
    "exact_multiply_add",
    "less",
    "load",
    "maximum",
    "minimum",
    "rounded",
    "select",
    "spread",
    "store",
    "whole",
]

LANES: Final = 16

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)


class _Floats(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


class _Mask(types.Type):
    def __init__(self) -> None:
        super().__init__(name="bool1x16")


_floats: Any = _Floats()
_mask: Any = _Mask()


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)  # type: ignore[no-untyped-call]


@register_model(_Mask)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _BITS)  # type: ignore[no-untyped-call]


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _binary(build: Callable[[Any, Any, Any], Any]) -> Any:
    def operation(typingctx: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return build(builder, *arguments)

        return _floats(_floats, _floats), generate

    return machine_operation(operation)


#: The second one where the two are equal, or one of them is NaN.
minimum = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
maximum = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def _operator(symbol: Callable[[Any, Any], Any], operation: Any) -> None:
    def typed(left: Any, right: Any) -> Any:
        both_fit = isinstance(left, _Floats) and isinstance(right, _Floats)
        return (lambda left, right: operation(left, right)) if both_fit else None

    typed.__annotations__ = {}  # numba compares them with those of the lambda
    overload(symbol)(typed)


_operator(operator.add, _binary(lambda builder, a, b: builder.fadd(a, b)))
_operator(operator.sub, _binary(lambda builder, a, b: builder.fsub(a, b)))
_operator(operator.mul, _binary(lambda builder, a, b: builder.fmul(a, b)))
_operator(operator.truediv, _binary(lambda builder, a, b: builder.fdiv(a, b)))


@machine_operation
def exact_multiply_add(typingctx: Any, left: Any, right: Any, addend: Any) -> Any:
    """left · right + addend, where neither the product nor the sum needs rounding.

    Then it does not matter whether the machine rounds in between, and the faster form is taken.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fused = builder.module.declare_intrinsic(f"llvm.fmuladd.v{LANES}f32", (), kind)
        return builder.call(fused, arguments)

    return _floats(_floats, _floats, _floats), build


@machine_operation
def spread(typingctx: Any, value: Any) -> Any:
    """`value`, a binary32, in every lane."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lane = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), arguments[0], lane)
        return builder.shuffle_vector(one, one, ir.Constant(_INTEGERS, [0] * LANES))

    return _floats(types.float32), build


@machine_operation
def load(typingctx: Any, address: Any) -> Any:
    """The 64 bytes at `address`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _FLOATS.as_pointer()), align=4)

    return _floats(types.intp), build


@machine_operation
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the 64 bytes at `address`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = builder.inttoptr(arguments[0], _FLOATS.as_pointer())
        builder.store(arguments[1], target, align=4)
        return context.get_dummy_value()

    return types.void(types.intp, _floats), build


@machine_operation
def whole(typingctx: Any, value: Any) -> Any:
    """The value without its fraction; for magnitudes below 2^31."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(builder.fptosi(arguments[0], _INTEGERS), _FLOATS)

    return _floats(_floats), build


@machine_operation
def rounded(typingctx: Any, value: Any) -> Any:
    """The next integer, ties to the even one; for 0 to 2^23."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Above 2^23 the last place is 1.
        shift = _constant(2.0**23)
        return builder.fsub(builder.fadd(arguments[0], shift), shift)

    return _floats(_floats), build


@machine_operation
def less(typingctx: Any, left: Any, right: Any) -> Any:
    """Where left < right, as a mask; nowhere for NaN."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fcmp_ordered("<", arguments[0], arguments[1])

    return _mask(_floats, _floats), build


@machine_operation
def both(typingctx: Any, left: Any, right: Any) -> Any:
    """Where both masks are set."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.and_(arguments[0], arguments[1])

    return _mask(_mask, _mask), build


@machine_operation
def select(typingctx: Any, mask: Any, left: Any, right: Any) -> Any:
    """`left` where the mask is set, else `right`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return _floats(_mask, _floats, _floats), build
