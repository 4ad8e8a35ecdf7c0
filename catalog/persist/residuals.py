"""Computes the residuals of staged rows to the full of their chain (format §3.7).

The rows of the full come from files on this host, and from the store where these are lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.persist.base_cache import BaseCache
from recpoint.catalog.persist.block_rows import BlockRows
from recpoint.catalog.persist.plan import RowBlock
from recpoint.catalog.restore.base_rows import BaseRows, base_entries
from recpoint.catalog.restore.chunks import StoreChunks, read_rows
from recpoint.catalog.run.chain import read_base
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.job import StagedJob, ids_name, values_name
from recpoint.catalog.staging.slot_reading import read_into
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ChainError, MalformedObject, MissingLink, ObjectNotFound
from recpoint.format.job import Job
from recpoint.format.manifest import Manifest
from recpoint.kernels.residuals import subtract

__all__ = ["BlockResiduals", "ResidualRows", "residuals_to", "staged_ids"]

_log = logging.getLogger("recpoint")

#: Chunks of the full that are read at once.
_READERS: Final = 2

#: Tables whose rows of the full stay in memory: those of the groups in work.
_TABLES_AT_ONCE: Final = 2


def residuals_to(base: Tensor, rows: Tensor) -> Tensor:
    """Return what is quantized of rows, f32 [n, dim]; NaN in a row that MUST be stored exactly.

    Args:
        base: the rows as the full decodes to, [n, dim], of the table's dtype.
        rows: the staged rows, like `base`.
    """
    most = torch.finfo(rows.dtype).max
    return subtract(rows.to(torch.float32), base.to(torch.float32), most)


def staged_ids(staged: StagedJob, table: int, spans: Sequence[range]) -> Tensor:
    """Return the ids of staged rows in the whole table, int64 [n], ascending.

    Args:
        staged: the job.
        table: index of the table.
        spans: positions among the staged rows, ascending, at least one.

    Raises:
        MalformedObject: the ids do not ascend, or are not in the shard.
        StagingError: the slot cannot be read.
    """
    of_table = staged.job.tables[table]
    if of_table.all_rows:
        positions = [torch.arange(span.start, span.stop, device="cpu") for span in spans]
        return torch.cat(positions) + of_table.first_row
    name = ids_name(table)
    extents = [staged.extent(name, first=span.start, count=len(span)) for span in spans]
    data = bytearray(sum(extent.length for extent in extents))
    read_into(memoryview(data), *extents)
    ids = torch.frombuffer(data, dtype=torch.int64)
    ascends = bool((ids[1:] > ids[:-1]).all())
    if not ascends or int(ids[0]) < 0 or int(ids[-1]) >= of_table.id_bound:
        raise MalformedObject(
            f"{staged.slot} ({name})",
            found=f"ids from {int(ids[0])} to {int(ids[-1])}, {'' if ascends else 'not '}ascending",
            expected=f"ascending ids below {of_table.id_bound}",
            next_step="nothing: the job is rejected, and the trainer stages its rows again",
        )
    return ids + of_table.first_row


class ResidualRows:
    """The rows of the full that the increments of a job stand on; reads them from the store.

    Several threads may use it.

    Args:
        job: an increment.
        open_run: opens its run.
        cache: keeps the rows on this host.
    """

    def __init__(self, job: Job, open_run: Callable[[], Run], cache: BaseCache) -> None:
        self._job = job
        self._cache = cache
        self._open_run = open_run
        self._lock = threading.Lock()
        self._full: Manifest | None = None
        self._tables: dict[int, BaseRows] = {}

    def of(self, table: int, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the residuals of staged rows of a table, as `residuals_to` does.

        Args:
            table: index of the table.
            ids: int64 [n], ascending, without duplicates, in the shard of the job; of the whole
                table.
            rows: the staged rows, [n, dim] of the table's dtype.

        Raises:
            MissingLink: the full, or a chunk of it, is gone.
            FormatError: the full is damaged.
            ChainError: the full has another table in its place.
            StoreError: the store cannot be read.
        """
        with self._lock:
            base = self._tables.get(table)
            if base is None:
                while len(self._tables) >= _TABLES_AT_ONCE:
                    del self._tables[next(iter(self._tables))]
                base = self._tables[table] = self._read(table)
        return residuals_to(base.values_of(ids - self._shard(table).start), rows)

    def _shard(self, table: int) -> range:
        staged = self._job.tables[table]
        return range(staged.first_row, staged.first_row + staged.id_bound)

    def _read(self, table: int) -> BaseRows:
        run = self._open_run()
        full = self._full = self._full or self._read_full(run)
        spec = self._job.tables[table].spec
        if table >= len(full.tables) or full.tables[table] != spec:
            raise ChainError(
                f"{self._job.base} (table {spec.name!r:.80})",
                found="another table than the job has",
                expected="the same tables in the whole chain",
                next_step="nothing: the job is rejected, and the trainer writes a full",
            )
        source, shard = StoreChunks(run.store), self._shard(table)
        base, not_kept = BaseRows(full, table, shard), []
        for entry in base_entries(full, table, shard):
            kept_rows = self._cache.read(entry, spec)
            if kept_rows is None:
                not_kept.append(entry)
            else:
                base.add(kept_rows)
        has_room = True
        with ReadScheduler(_READERS) as reads:
            for entry, outcome in reads.in_order(
                not_kept, lambda entry: read_rows(source, full, entry)
            ):
                try:
                    stored = outcome.result()
                    base.add(stored)
                    has_room = has_room and self._cache.write(entry, stored)
                except ObjectNotFound as error:
                    raise MissingLink(
                        error.subject,
                        found=error.found,
                        expected=f"a chunk of {self._job.base}, to whose rows {self._job.ref} "
                        "adds residuals",
                        next_step="nothing: the job is rejected, and the trainer writes a full",
                    ) from error
        if not_kept:
            _log.info(
                "read %d chunks of %s for residuals of table %r; its rows take %d bytes of memory, "
                "and are %s in %s",
                len(not_kept),
                full.ref,
                spec.name,
                base.nbytes,
                "kept" if has_room else "not kept for lack of room",
                self._cache.directory,
            )
        return base

    def _read_full(self, run: Run) -> Manifest:
        assert self._job.base is not None  # the job is an increment
        return read_base(self._job.base, self._job.ref, run.read_manifest)


class BlockResiduals:
    """The residuals of the rows of a block, read as `BlockRows` reads a segment.

    Args:
        staged: the job.
        block: the block.
        residuals: the rows of the full.
    """

    def __init__(self, staged: StagedJob, block: RowBlock, residuals: ResidualRows) -> None:
        self._staged, self._block, self._residuals = staged, block, residuals
        self._values = BlockRows(staged, block, values_name(block.table))

    def read(self, rows: range) -> Tensor:
        """Return the residuals of some of the rows, f32 [n, dim], as `ResidualRows.of`.

        Args:
            rows: positions in the block, at least one.

        Raises:
            MalformedObject, StagingError: as `staged_ids`.
            RecpointError: as `ResidualRows.of`.
        """
        first, table = self._block.first, self._block.table
        ids = staged_ids(self._staged, table, [range(first + rows.start, first + rows.stop)])
        return self._residuals.of(table, ids, self._values.read(rows))
