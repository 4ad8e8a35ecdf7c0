"""Records in blocks of files, on a CPU: checksums, copies and the queue of reads are native."""

from __future__ import annotations

from array import array
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.native import library
from recpoint.kernels.row_blocks.layout import BlockForm, require_rows

__all__ = ["Channel", "fill", "take"]

_LANE_BYTES: Final = 32 << 10
#: A channel has at least as many bytes: a block of the longest records.
_FEWEST_LANES: Final = 32


def fill(
    records: Tensor, ids: Tensor, *, table: int, form: BlockForm, memory: Tensor, first: int
) -> None:
    """Write records to slots of blocks in memory, with their headers."""
    _require_ids("ids", ids, len(records))
    require_rows("records", records, None, form.record_bytes)
    _require_blocks(memory, form)
    last = first + len(records)
    if not 0 <= first <= last <= memory.numel() // form.block_bytes * form.slots:
        raise ValueError(f"first: slots {first} … {last}, expected slots of {memory.numel()} bytes")
    packed = form.packed()
    library.fill_slots_of_blocks(
        records.data_ptr(), ids.data_ptr(), len(records), table, _address(packed),
        memory.data_ptr(), first,
    )  # fmt: skip


def take(
    memory: Tensor, slots: Tensor, out: Tensor, positions: Tensor, *, form: BlockForm, whole: bool
) -> None:
    """Copy the records of slots in memory to out[positions]."""
    _require_blocks(memory, form)
    _require_ids("slots", slots, len(slots))
    _require_inside("slots", slots, memory.numel() // form.block_bytes * form.slots)
    _require_out(out, slots, positions, form, whole)
    packed = form.packed()
    library.take_slots(
        memory.data_ptr(), slots.data_ptr(), len(slots), _address(packed), whole, out.data_ptr(),
        positions.data_ptr(),
    )  # fmt: skip


class Channel:
    """Reads and replaces rows in files, many at once. For one thread at a time.

    Args:
        lanes: reads or writes at once, 32 or more; each has 32 KiB of memory.
        wait_for_each: do without the kernel's asynchronous reads. A channel also does so where the
            system refuses them.

    Raises:
        ValueError: fewer lanes.
        MemoryError: there is no memory.
    """

    def __init__(self, *, lanes: int = 128, wait_for_each: bool = False) -> None:
        self._address = 0
        if lanes < _FEWEST_LANES:
            raise ValueError(f"lanes: {lanes}, expected {_FEWEST_LANES} or more")
        self._lanes = lanes
        self._address = library.new_channel(lanes, wait_for_each)
        if not self._address:
            raise MemoryError("no memory to read rows from files")
        # A channel is freed by the version of the kernels that made it.
        self._free = library.free_channel

    def __del__(self) -> None:
        if self._address:
            self._free(self._address)

    @property
    def is_asynchronous(self) -> bool:
        """Whether several reads run at once."""
        return bool(library.is_asynchronous(self._address))

    @property
    def nbytes(self) -> int:
        """Memory of the channel, in bytes."""
        return self._lanes * _LANE_BYTES

    def read(
        self,
        files: Tensor,
        slots: Tensor,
        ids: Tensor,
        out: Tensor,
        positions: Tensor,
        *,
        table: int,
        form: BlockForm,
        whole: bool = False,
    ) -> Tensor:
        """Read rows. Row i goes to out[positions[i]] if it is found; else `out` is left alone.

        Neighbouring rows that lie near each other in a file are read at once, so places should
        ascend as far as they can.

        Args:
            files: int64 [n], descriptors. With O_DIRECT, they must take reads of 4,096 bytes.
            slots: int64 [n], slots in the files.
            ids: int64 [n], the row that each slot is expected to have.
            out: uint8 [rows, record_bytes]; [rows, slot_bytes] if `whole`.
            positions: int64 [n], rows of `out`.
            table: the table that each slot is expected to have.
            form: the layout.
            whole: copy the slots with their headers.

        Returns:
            int64 [n]: a `State`, or -errno. After an error of the system the other rows may be
            NOT_READ.

        Raises:
            ValueError: a tensor has another form.
            IndexError: a slot or a position is outside.
        """
        n = len(ids)
        for name, tensor in (("files", files), ("slots", slots), ("ids", ids)):
            _require_ids(name, tensor, n)
        _require_inside("slots", slots, 1 << 52)
        _require_out(out, slots, positions, form, whole)
        states = torch.empty(n, dtype=torch.int64, device="cpu")
        packed = form.packed()
        library.read_slots(
            self._address, _address(packed), table, whole, n, files.data_ptr(), slots.data_ptr(),
            ids.data_ptr(), out.data_ptr(), positions.data_ptr(), states.data_ptr(),
        )  # fmt: skip
        return states

    def patch(self, files: Tensor, slots: Tensor, rows: Tensor, *, form: BlockForm) -> Tensor:
        """Replace slots: their blocks are read, changed and written.

        Args:
            files: int64 [n], descriptors.
            slots: int64 [n], ascending within each file. Rows of a file follow each other.
            rows: uint8 [n, slot_bytes], whole slots.
            form: the layout.

        Returns:
            int64 [n]: as `read`. FOUND says that the row was written.

        Raises:
            ValueError: a tensor has another form.
            IndexError: a slot is outside.
        """
        n = len(slots)
        for name, tensor in (("files", files), ("slots", slots)):
            _require_ids(name, tensor, n)
        _require_inside("slots", slots, 1 << 52)
        require_rows("rows", rows, n, form.slot_bytes)
        states = torch.empty(n, dtype=torch.int64, device="cpu")
        packed = form.packed()
        library.patch_slots(
            self._address, _address(packed), n, files.data_ptr(), slots.data_ptr(),
            rows.data_ptr(), states.data_ptr(),
        )  # fmt: skip
        return states


def _require_blocks(memory: Tensor, form: BlockForm) -> None:
    require("memory", memory, torch.uint8, 1)
    if not memory.is_cpu or memory.numel() % form.block_bytes:
        raise ValueError(
            f"memory: {memory.numel()} bytes on {memory.device}, expected blocks of "
            f"{form.block_bytes} on the cpu"
        )


def _require_ids(name: str, ids: Tensor, n: int) -> None:
    require(name, ids, torch.int64, 1)
    if not ids.is_cpu or len(ids) != n:
        raise ValueError(f"{name}: {len(ids)} on {ids.device}, expected {n} on the cpu")


def _require_inside(name: str, values: Tensor, limit: int) -> None:
    wrong = library.first_outside(values.data_ptr(), len(values), limit)
    if wrong >= 0:
        raise IndexError(f"{name}: {int(values[wrong])}, expected 0 … {limit - 1}")


def _require_out(
    out: Tensor, slots: Tensor, positions: Tensor, form: BlockForm, whole: bool
) -> None:
    require_rows("out", out, None, form.slot_bytes if whole else form.record_bytes)
    _require_ids("positions", positions, len(slots))
    _require_inside("positions", positions, len(out))


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
