"""The few machine operations that numba does not offer by name, and the one way kernels compile.

CPU kernels take addresses and counts as plain integers. Turning a tensor into an array object for
numba costs more than marking a whole batch of ids; an address costs a tenth of a microsecond.
Whoever calls a kernel has checked dtype, contiguity and bounds, because the kernel cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from recpoint.kernels.code_cache import cache_of

__all__ = [
    "ask_for",
    "bits_of_float",
    "call_for_long",
    "call_with",
    "compiled",
    "compiled_team_work",
    "copy_row",
    "entry_point",
    "float_from_bits",
    "inlined",
    "lowest_bit",
    "machine_operation",
    "pointer",
    "prefetch",
    "set_bits",
    "stream_line",
    "take_turn",
]


def compiled(*, nogil: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile with numba on the first call, and keep the result on disk where that is possible.

    Args:
        nogil: release the GIL while it runs. Kernels that change shared state keep it: then two
            Python threads cannot interleave inside one.

    `error_model="numpy"` turns Python's check for division by zero off; it changes no result
    here. Fast-math stays off and no multiply-add is fused: format §3.2 fixes each operation.

    Compiled code lets go of an array after the last line that names it, and an address is no name:
    an array made in a kernel is given to another one, which takes the address of its argument.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kernel: Any = numba.njit(nogil=nogil, error_model="numpy")(function)
        kernel._cache = cache_of(function)
        return cast("Callable[..., Any]", kernel)

    return decorate


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of kernels, compiled anew wherever it is called, with the constants given there."""
    part: Callable[..., Any] = numba.njit(inline="always", error_model="numpy")(function)
    return part


@cache
def entry_point(kernel: Any, arguments: int) -> Callable[..., Any]:
    """The machine code of a kernel that takes that many integers, without the choice by types.

    Choosing takes as long as marking a small batch, and several times that when the step between
    two calls has emptied the caches.
    """
    signature = (types.int64,) * arguments
    kernel.compile(signature)
    entry: Callable[..., Any] = kernel.overloads[signature].entry_point
    return entry


def compiled_team_work(function: Callable[[int], None]) -> Callable[[], int]:
    """A C function `void (*)(void *)` that each thread of a team runs, see `threads.as_team`.

    It must not make arrays, nor call what does: numba tells nobody of an error in a C function, so
    that what a failed allocation kept it from writing would pass for written.

    Returns:
        What gives its address; compiles it on the first call. It never takes the GIL.
    """

    @cache
    def address() -> int:
        work: Any = CFunc(function, ((types.intp,), types.void), {}, {})
        work._cache = cache_of(function)
        work.compile()
        _team_work.append(work)  # owns the machine code
        return cast(int, work.address)

    return address


_team_work: list[Any] = []


def machine_operation(build: Callable[..., Any]) -> Any:
    """`intrinsic`, for callers that do not see the typing context its functions begin with."""
    return intrinsic(build)


@machine_operation
def pointer(typingctx: Any, address: Any) -> Any:
    """The integer `address` as an untyped pointer, for `numba.carray`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), build


@machine_operation
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


@machine_operation
def stream_line(typingctx: Any, to: Any, source: Any) -> Any:
    """Copy 64 bytes between addresses divisible by 32, past the caches on the writing side.

    A line that is written whole need not be read first, which saves a third of the traffic of a
    large copy. Other threads see such stores after the next lock operation, as they do any other.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(64), 4)
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for at in (0, 32):
            shift = ir.Constant(ir.IntType(64), at)
            origin = builder.inttoptr(builder.add(arguments[1], shift), lanes.as_pointer())
            destination = builder.inttoptr(builder.add(arguments[0], shift), lanes.as_pointer())
            store = builder.store(builder.load(origin, align=32), destination, align=32)
            store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), build


def ask_for(builder: Any, place: Any) -> None:
    """Ask for the line at `place` to be brought into the second-level cache; it need not exist."""
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
    hint = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
    read, second_level, data = (ir.Constant(word, value) for value in (0, 2, 1))
    builder.call(hint, [builder.bitcast(place, cgutils.voidptr_t), read, second_level, data])


@machine_operation
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the line at `address` to be brought into the second-level cache."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ask_for(builder, builder.inttoptr(arguments[0], cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(types.intp), build


@machine_operation
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The binary32 value whose bit pattern is the int32 `bits`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), build


@machine_operation
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """The bit pattern of a binary32 value, as int32."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), build


@machine_operation
def lowest_bit(typingctx: Any, word: Any) -> Any:
    """The position of the lowest set bit of a u32 or u64; its width for zero."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return word(word), build


@machine_operation
def set_bits(typingctx: Any, word: Any) -> Any:
    """How many bits of a u32 or u64 are set."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return word(word), build


@machine_operation
def take_turn(typingctx: Any, counter: Any) -> Any:
    """Add 1 to the int64 at address `counter` and return what it was; each value comes up once."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        place = builder.inttoptr(arguments[0], word.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(word, 1), "seq_cst")

    return types.int64(types.intp), build


@machine_operation
def call_with(typingctx: Any, function: Any, data: Any) -> Any:
    """Call the C function `void function(void *data)` at an address."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        place, given = arguments
        builder.call(
            builder.inttoptr(place, kind.as_pointer()), [builder.inttoptr(given, cgutils.voidptr_t)]
        )
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), build


@machine_operation
def call_for_long(typingctx: Any, function: Any) -> Any:
    """What the C function `long function(void)` at an address returns, or what is as long."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])

    return types.int64(types.intp), build
