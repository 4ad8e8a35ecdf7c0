"""The few machine operations that numba does not offer by name, and the one way kernels compile.

CPU kernels take addresses and counts as plain integers. Turning a tensor into an array object for
numba costs more than marking a whole batch of ids; an address costs a tenth of a microsecond.
Whoever calls a kernel has checked dtype, contiguity and bounds, because the kernel cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["compiled", "copy_row", "float_from_bits", "lowest_bit", "pointer", "set_bits"]


def compiled(*, nogil: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile with numba on the first call, and keep the result on disk where that is possible.

    Args:
        nogil: release the GIL while it runs. Kernels that change shared state keep it: then two
            Python threads cannot interleave inside one.

    `error_model="numpy"` turns Python's check for division by zero off; it changes no result
    here. Fast-math stays off and no multiply-add is fused: format §3.2 fixes each operation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"nogil": nogil, "error_model": "numpy"}
        try:
            kernel: Callable[..., Any] = numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # Neither the package folder nor a user cache can be written: compile in each process.
            kernel = numba.njit(cache=False, **options)(function)
        return kernel

    return decorate


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """The integer `address` as an untyped pointer, for `numba.carray`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), build


@intrinsic
def copy_row(typingctx: Any, to: Any, source: Any, length: Any) -> Any:
    """Copy `length` bytes from address `source` to address `to`; the two must not overlap."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        destination, origin, size = arguments
        copy = builder.module.declare_intrinsic(
            "llvm.memcpy", [cgutils.voidptr_t, cgutils.voidptr_t, ir.IntType(64)]
        )
        builder.call(
            copy,
            [
                builder.inttoptr(destination, cgutils.voidptr_t),
                builder.inttoptr(origin, cgutils.voidptr_t),
                size,
                ir.Constant(ir.IntType(1), 0),
            ],
        )
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), build


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The binary32 value whose bit pattern is the int32 `bits`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def lowest_bit(typingctx: Any, word: Any) -> Any:
    """The position of the lowest set bit of a u32; 32 for zero."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint32(types.uint32), build


@intrinsic
def set_bits(typingctx: Any, word: Any) -> Any:
    """How many bits of a u32 are set."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint32(types.uint32), build
