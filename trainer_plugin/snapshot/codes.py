"""Quantizes tables on their own device during a cut, and drains a GPU's rows to the host later.

The method by which each table is quantized, and quantizing on the table's device (format §7). This
process never chooses the method, because choosing takes longer than a stall may. Either the setting
leaves no choice, or the method is the one that the agent chose for an earlier checkpoint of the
chain. The job names the method, so the stored bytes do not depend on where rows are quantized.

Codes take less space in the slot than values, by the ratio of the widths. For a table on a GPU,
fewer bytes are copied to the host, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.staging.job import kernel_method
from recpoint.embeddings.cache.view import CacheView, RowsAtHome
from recpoint.embeddings.home.contract import Checked
from recpoint.embeddings.tables.tables import Table
from recpoint.format.dtypes import Dtype, item_bytes
from recpoint.format.history import RULE_BITS
from recpoint.format.manifest import CheckedStripes, ChosenMethod, Quantizer
from recpoint.format.records import CheckpointRef
from recpoint.kernels import row_gather
from recpoint.kernels.bit_packing.widths import packed_width
from recpoint.kernels.quantize import ExactRows, PackedRows, exact_rows_many, quantize_rows
from recpoint.trainer_plugin.schedule.ledger import Pending
from recpoint.trainer_plugin.settings import Precision
from recpoint.trainer_plugin.snapshot import device_memory
from recpoint.trainer_plugin.snapshot.device_memory import DeviceMemory

__all__ = ["Codes", "DeviceDrain", "RowsToCode", "TableQuantizer"]


#: Size of a pinned bounce buffer, and of a piece if there is no spare device memory.
PIECE_BYTES = 32 << 20

#: An allocation up to this size is tried without asking the device how much memory is free.
SMALL_BYTES = 64 << 10


class DeviceDrain:
    """Brings the rows of one snapshot to the host: from their device, or from a cache and its home.

    `gather`, `fetch` and `release_training` run in the stall; `drain` runs in the background
    thread.

    Args:
        view: reads the rows of cached tables; None: no table is cached.
        memory: says how much memory buffers may take on a device.
    """

    def __init__(self, view: CacheView | None = None, memory: DeviceMemory | None = None) -> None:
        self._view = view
        self._memory = device_memory.of_this_process() if memory is None else memory
        self._gathers: list[tuple[Tensor, Tensor, Tensor]] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._ready: dict[torch.device, torch.cuda.Event] = {}

    def gather(self, source: Tensor, ids: Tensor | None, out: Tensor) -> None:
        """Have rows of `source` arrive in `out`, on the host.

        With enough spare device memory, `release_training` copies the rows on the device, for all
        sources in one launch. Otherwise, the rows are copied to the host piece by piece before this
        returns.

        Args:
            source: [rows, …] on a GPU.
            ids: int64 [n] on the same GPU; None: all rows.
            out: [n, …] of the same dtype, on the host.
        """
        if out.nbytes == 0:
            return
        if out.nbytes <= SMALL_BYTES or out.nbytes <= self._memory.spare_bytes(source.device):
            try:
                buffer = torch.empty(out.shape, dtype=out.dtype, device=source.device)
            except torch.OutOfMemoryError:
                pass  # the spare memory is in pieces that are too small: copy piece by piece
            else:
                if ids is None:
                    buffer.copy_(source)
                else:
                    self._gathers.append((source, ids, buffer))
                self.take(buffer, out)
                return
        rows = max(1, PIECE_BYTES // max(1, out[0].nbytes))
        for start in range(0, out.shape[0], rows):
            part = out[start : start + rows]
            if ids is None:
                part.copy_(source[start : start + rows])
            else:
                piece = torch.empty(part.shape, dtype=out.dtype, device=source.device)
                row_gather.gather(source, ids[start : start + rows], piece)
                part.copy_(piece)

    def take(self, buffer: Tensor, out: Tensor) -> None:
        """Have `buffer`, contiguous and no longer written to, arrive in `out`, on the host."""
        if out.nbytes:
            self._waiting.append((buffer, out))
            self._memory.hold(buffer.device, buffer.nbytes)

    def fetch(self, table: str, ids: Tensor | None, outs: Sequence[Tensor]) -> None:
        """Have rows of a cached table arrive in `outs`; see `CacheView.fetch`."""
        assert self._view is not None
        self._view.fetch(table, ids, outs)

    def stage(self, table: str, ids: Tensor | None) -> None:
        """Have the embedding servers stage rows of a cached table; see `CacheView.stage`."""
        assert self._view is not None
        self._view.stage(table, ids)

    @property
    def stripes(self) -> CheckedStripes | None:
        """What was compared with parity at the rows' home, once drained; None: nothing was."""
        checked = Checked() if self._view is None else self._view.checked
        if checked == Checked():
            return None
        return CheckedStripes(fits=checked.stripes, unknown=checked.unknown)

    def release(self) -> None:
        """Give up the buffers, and what is held of a cache and its home, after a failed cut."""
        self._gathers.clear()
        self._let_go()
        if self._view is not None:
            self._view.release()

    def _let_go(self) -> None:
        for buffer, _ in self._waiting:
            self._memory.release(buffer.device, buffer.nbytes)
        self._waiting.clear()
        self._ready.clear()

    def release_training(self) -> None:
        """Launch the gathers; record on each device's current stream when its copies are done.

        Training may change the tables after this returns, in the same streams.
        """
        if self._view is not None:
            self._view.begin()
        for device in {buffer.device for _, _, buffer in self._gathers}:
            chosen = [gather for gather in self._gathers if gather[2].device == device]
            row_gather.gather_many(*zip(*chosen, strict=True))
        self._gathers.clear()
        for buffer, _ in self._waiting:
            if buffer.device not in self._ready:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(buffer.device))
                self._ready[buffer.device] = event

    def drain(self, stage: Callable[[Sequence[RowsAtHome]], Checked] | None = None) -> None:
        """Copy everything to the host, on a separate stream, and release the device buffers.

        Args:
            stage: has the embedding servers stage rows; None: they stage none.

        Raises:
            HomeError: rows of a cached table cannot be read from their home, or staged there, or do
                not fit their parity.
        """
        if self._view is not None:
            self._view.finish(stage)
        if not self._waiting:
            return
        pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
        for device, event in self._ready.items():
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            for buffer, out in self._waiting:
                if buffer.device != device:
                    continue
                # The allocator must not hand the buffer to training while this stream reads it.
                buffer.record_stream(stream)
                _through(pinned, stream, _bytes(buffer), _bytes(out))
        self._let_go()


def _through(pinned: Tensor, stream: torch.cuda.Stream, source: Tensor, out: Tensor) -> None:
    for start in range(0, source.numel(), pinned.numel()):
        piece = source[start : start + pinned.numel()]
        with torch.cuda.stream(stream):
            pinned[: piece.numel()].copy_(piece, non_blocking=True)
        stream.synchronize()
        out[start : start + piece.numel()].copy_(pinned[: piece.numel()])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


_log = logging.getLogger("recpoint")

#: Bytes of a row besides its codes: scale, offset and a flag; on the device also a second flag and
#: the id.
_ROW_BYTES = 9
_ROW_BYTES_ON_DEVICE = 18

CODE_ARRAYS: dict[str, Dtype] = {"codes": "U8", "scale": "F32", "offset": "F32", "wide": "BOOL"}


#: A method is used until the job has trained this many times as many batches as when the method was
#: chosen; then it is chosen anew, because training spreads the values of rows.
_CHOSEN_UP_TO: Final = 2


class _Learned(NamedTuple):
    """A quantization method that the agent chose for a table.

    Attributes:
        bits: bits of each value for which it was chosen.
        step: step of the checkpoint for which it was chosen.
        method: the method.
    """

    bits: int
    step: int
    method: ChosenMethod


class RowsToCode(NamedTuple):
    """Rows of one table that are to be quantized.

    Attributes:
        table: the table.
        bits: bits of each value.
        method: as `TableQuantizer.method` returned it.
        ids: int64 [row_count], ascending, on the table's device; None: all rows.
        row_count: number of rows, at least 1.
    """

    table: Table
    bits: int
    method: ChosenMethod
    ids: Tensor | None
    row_count: int

    @property
    def values(self) -> Tensor:
        """The live values: [rows, dim]."""
        return self.table.weight.detach()

    @property
    def code_bytes(self) -> int:
        """Bytes that the codes take on a GPU."""
        width = packed_width(self.table.dim, self.bits)
        return self.row_count * (width + _ROW_BYTES_ON_DEVICE)


class Codes(NamedTuple):
    """Quantized rows of one table, on the table's device.

    Attributes:
        rows: the packed codes of all rows.
        exact: the rows that must be kept exactly.
    """

    rows: PackedRows
    exact: ExactRows

    def arrays(self) -> list[tuple[str, Dtype | None, Tensor]]:
        """Return name, stored dtype (None: the table's) and content of each array of the slot."""
        named = zip(CODE_ARRAYS.items(), (*self.rows[:3], self.rows.wide), strict=True)
        arrays: list[tuple[str, Dtype | None, Tensor]] = [
            (name, dtype, array) for (name, dtype), array in named
        ]
        return [*arrays, ("exact_at", "I64", self.exact.positions), ("exact", None, self.exact[1])]


class TableQuantizer:
    """Knows the method of each table, and quantizes tables in the cut.

    All methods are called from the training thread.

    Args:
        tables: tables in the order in which the job's tables are stored; None: this rank stores no
            row of it.
        precision: says where rows are quantized, and by which quantizer.
        memory: says how much memory codes may take on a device.

    Attributes:
        wanted: whether any table may be quantized by this process.
    """

    def __init__(
        self,
        tables: Sequence[Table | None],
        precision: Precision,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._memory = device_memory.of_this_process() if memory is None else memory
        self._tables = tuple(tables)
        self._on = precision.place
        self._name = precision.quantizer
        self.wanted = self._on != "host"
        self._learned: tuple[CheckpointRef | None, dict[str, _Learned]] = (None, {})

    def prepare(self, widths: Mapping[str, int | None]) -> None:
        """Compile the kernels that are known to be needed. Called before training.

        Args:
            widths: `Table.key` -> bits of each value; None: any width may be chosen.
        """
        for table in self._tables:
            if table is None:
                continue
            width = widths[table.key]
            for bits in RULE_BITS if width is None else (width,):
                method = _fixed(self._name, bits)
                if method is not None and self.may(table, bits):
                    _compile(table, bits, method)

    def remember(self, stored: Pending, quantizers: Sequence[Quantizer]) -> None:
        """Remember the methods by which a checkpoint was quantized, for the rest of its chain.

        Args:
            stored: a committed checkpoint.
            quantizers: the quantizers in its outcome, for this rank.
        """
        learned = dict(self._learned[1]) if self._learned[0] == stored.base else {}
        to_compile: list[tuple[Table, _Learned]] = []
        for quantizer in quantizers:
            table = self._tables[quantizer.table]
            if table is None or not _is_known(quantizer.chosen):
                continue  # not stored here, or a later release's method: the agent goes on choosing
            choice = _Learned(stored.bits[quantizer.table], stored.ref.step, quantizer.chosen)
            previous = learned.get(table.key)
            if previous is not None and previous._replace(step=choice.step) == choice:
                continue  # the same choice, seen before
            learned[table.key] = choice
            if table.weight.is_cuda and self.may(table, choice.bits):
                to_compile.append((table, choice))
        if not to_compile:
            self._learned = stored.base, learned
            return

        def compile_first() -> None:
            # Compiling a GPU kernel for the method takes seconds, too long for a stall.
            for table, choice in to_compile:
                _compile(table, choice.bits, choice.method)
            self._learned = stored.base, learned

        thread = threading.Thread(target=compile_first, name="recpoint-compile", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # from Python: "can't start new thread"
            _log.warning("no rows are quantized on the GPU until the next commit: %s", error)

    def method(
        self, table: Table, bits: int, *, base: CheckpointRef | None, step: int
    ) -> ChosenMethod | None:
        """Return the method for rows of a table; None: the agent chooses, or rows stay exact.

        Args:
            table: the table.
            bits: bits of each value.
            base: full of the chain; None: the checkpoint is a full.
            step: step of the checkpoint.
        """
        if not _is_narrower(table, bits):
            return None
        fixed = _fixed(self._name, bits)
        if fixed is not None:
            return fixed
        known_base, learned = self._learned
        choice = learned.get(table.key) if base is not None and known_base == base else None
        if choice is None or choice.bits != bits or step >= _CHOSEN_UP_TO * choice.step:
            return None
        return choice.method

    def codes(self, requests: Sequence[RowsToCode]) -> list[Codes | None]:
        """Quantize rows of tables that `may` allows; None in place of a table: stage its values.

        Waits once for each device of the tables, to learn whether rows must be kept exactly. If
        there are such rows, it waits once more for each table.
        """
        packed: list[PackedRows | None] = []
        taken_bytes: dict[torch.device, int] = {}
        for rows in requests:
            device = rows.values.device
            planned_bytes = taken_bytes.get(device, 0)
            if (
                not rows.values.is_cpu
                and rows.code_bytes > self._memory.spare_bytes(device) - planned_bytes
            ):
                packed.append(None)
                continue
            packed.append(_packed(rows))
            if packed[-1] is not None:
                taken_bytes[device] = planned_bytes + rows.code_bytes
        packed_rows = [
            (request, rows)
            for request, rows in zip(requests, packed, strict=True)
            if rows is not None
        ]
        try:
            exact = exact_rows_many(
                [request.values for request, _ in packed_rows],
                [request.ids for request, _ in packed_rows],
                [rows.exact for _, rows in packed_rows],
            )
        except torch.OutOfMemoryError:
            return [None] * len(requests)  # the spare memory is in pieces that are too small
        exact_rows = iter(exact)
        return [
            None if rows is None else _if_smaller(request, Codes(rows, next(exact_rows)))
            for request, rows in zip(requests, packed, strict=True)
        ]

    def may(self, table: Table, bits: int) -> bool:
        """Whether setting, width and the table's form allow quantizing in this process."""
        is_wanted = self._on == "device" or (self._on == "auto" and table.weight.is_cuda)
        possible = (table.weight.is_cuda or table.weight.is_cpu) and not table.cached
        return is_wanted and possible and _is_narrower(table, bits) and table.dtype != "F64"


def _packed(request: RowsToCode) -> PackedRows | None:
    """Quantize rows; None if the device has no room for the codes."""
    method = kernel_method(request.method)
    try:
        return quantize_rows(
            request.values, request.ids, request.bits, method, half_parameters=True
        )
    except torch.OutOfMemoryError:
        return None  # the spare memory is in pieces that are too small


def _if_smaller(request: RowsToCode, codes: Codes) -> Codes | None:
    """Return the codes; None if the values take less space.

    A slot therefore never takes more than a full of values, whatever the rows hold.
    """
    table = request.table
    value_bytes = table.dim * item_bytes(table.dtype)
    exact_bytes = codes.exact.positions.numel() * (8 + value_bytes)
    coded = request.row_count * (packed_width(table.dim, request.bits) + _ROW_BYTES)
    return codes if coded + exact_bytes <= request.row_count * value_bytes else None


def _is_narrower(table: Table, bits: int) -> bool:
    return bits < 8 * item_bytes(table.dtype)


def _is_known(method: ChosenMethod) -> bool:
    try:
        kernel_method(method)
    except ValueError:
        return False
    return True


def _compile(table: Table, bits: int, method: ChosenMethod) -> None:
    row = torch.zeros_like(table.weight[:1], requires_grad=False)
    first = torch.zeros(1, dtype=torch.int64, device=row.device)
    for ids in (None, first):
        quantize_rows(row, ids, bits, kernel_method(method), half_parameters=True)


@cache
def _fixed(quantizer: str, bits: int) -> ChosenMethod | None:
    """Return the method if the setting leaves the agent no choice, else None."""
    if quantizer == "auto" and bits == 8:
        quantizer = "asymmetric"
    if quantizer not in ("asymmetric", "symmetric"):
        return None
    return ChosenMethod(method=quantizer, bins=0, ratio_permille=0, refits=0, sample_rows=0, seed=0)
