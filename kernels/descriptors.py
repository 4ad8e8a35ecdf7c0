"""One launch for many tensors: their addresses and counts lie in one small tensor on the device.

A model has dozens of tables, and a launch costs more than the work on one of them. A kernel that
serves many gets a table of int64 [1 + fields, slots]: column k describes entry k, row 0 holds the
first program that works for it, and the other rows hold what the kernel needs, such as addresses.
"""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Launch", "entry_and_part", "plan"]

#: Kernels are compiled for a number of slots: up to this many entries they share one version.
_FEWEST_SLOTS: Final = 32
#: Tables kept on their device. Addresses come again in most steps, since torch reuses its memory.
_KEPT: Final = 64
#: First program of the slots that are not used: no program reaches it.
_NEVER: Final = 1 << 62

_kept: OrderedDict[tuple[object, ...], Launch] = OrderedDict()
_lock = threading.Lock()


class Launch(NamedTuple):
    """The table of one launch, on its device; its slots; the programs that are to be started."""

    table: Tensor
    slots: int
    programs: int


@triton.jit
def entry_and_part(table, SLOTS: tl.constexpr):
    """The entry that this program works for, and the program's number among that entry's.

    All first programs are read at once and compared: a search would wait for memory several times.
    """
    program = tl.program_id(0).to(tl.int64)
    first = tl.load(table + tl.arange(0, SLOTS))
    entry = tl.sum((first <= program).to(tl.int32), axis=0) - 1
    return entry, program - tl.load(table + entry)


def plan(
    entries: Sequence[tuple[int, ...]], programs: Sequence[int], device: torch.device
) -> Launch:
    """Bring a table to `device`, without waiting for it.

    Args:
        entries: the fields of each entry; at least one entry, all of the same length.
        programs: programs of each entry, 1 or more.
        device: whose current stream the kernel will be launched on.

    Raises:
        RuntimeError: the stream is being captured. A CUDA graph would read the table again in each
            replay, when others may lie there.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a launch for many tensors cannot be part of a CUDA graph; call it outside the capture"
        )
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    # The stream is part of the key: only on the same one is the copy sure to be over by then.
    key = (device, stream, tuple(programs), tuple(entries))
    with _lock:
        plan = _kept.get(key)
        if plan is not None:
            _kept.move_to_end(key)
            return plan
    slots = max(_FEWEST_SLOTS, triton.next_power_of_2(len(entries)))
    unused = slots - len(entries)
    firsts, total = [], 0
    for count in programs:
        firsts.append(total)
        total += count
    columns = [[*firsts, *[_NEVER] * unused]]
    columns += [[*values, *[0] * unused] for values in zip(*entries, strict=True)]
    # A copy from pinned memory waits for nothing, and torch keeps that memory until it is over.
    host = torch.tensor(columns, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
    launch = Launch(host.to(device, non_blocking=True), slots, total)
    with _lock:
        _kept[key] = launch
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)
    return launch
