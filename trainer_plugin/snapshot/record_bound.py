"""Refuses checkpoints whose records would exceed the format's limit, before anything is staged.

Otherwise the agent would find out after it uploaded everything. It would reject the checkpoint, and
the next one would be a full again, which is rejected as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from recpoint.catalog.persist.ranks import MAX_PARTS_BYTES
from recpoint.catalog.persist.record_sizes import PartSizes, part_sizes
from recpoint.embeddings.server.served_part import refuse_long_description
from recpoint.errors import HomeError, RecordTooLarge, SettingsError
from recpoint.format import paging, records
from recpoint.format.history import ChosenPrecision
from recpoint.format.job import StagedTable
from recpoint.format.manifest import CODE_BITS, Kind, StateBits, TableSpec
from recpoint.format.paging import manifest_fits
from recpoint.format.squared_states import squared_states
from recpoint.trainer_plugin.policy import FULL, ChainLink
from recpoint.trainer_plugin.ranks.agreement import RecordNeeds
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable

__all__ = ["RecordBound"]

_log = logging.getLogger("recpoint")


class _Narrower(NamedTuple):
    """A setting that stores fewer bits.

    Attributes:
        bits: bits of each value; None: as set.
        state_bits: bits of each value of element-wise row states; None: as set.
    """

    bits: int | None
    state_bits: StateBits | None

    def __str__(self) -> str:
        if self.bits is None:
            return f"bits=Precision(state={self.state_bits})"
        if self.state_bits is None:
            return f"bits={self.bits}"
        return f"bits=Precision(bits={self.bits}, state={self.state_bits})"

    def of(self, table: StagedTable) -> StagedTable:
        """Return the table as it is staged with this setting."""
        changes: dict[str, object] = {}
        if self.bits is not None and self.bits < table.bits:
            changes |= {"bits": self.bits, "allocation": None}
        if self.state_bits is not None and self.state_bits < (table.state_bits or 32):
            moments = squared_states(table.spec) if self.state_bits == 8 else None
            changes |= {"state_bits": self.state_bits, "second_moments": moments}
        return table.model_copy(update=changes)


_AS_SET: Final = _Narrower(None, None)
#: What a person can change, from the least change on.
_NARROWER: Final = (
    _Narrower(None, 16),
    _Narrower(None, 8),
    *(_Narrower(bits, None) for bits in sorted(CODE_BITS, reverse=True)),
    _Narrower(min(CODE_BITS), 16),
    _Narrower(min(CODE_BITS), 8),
)
#: What helps otherwise. Each part stores a chunk or more of each table of which it has rows.
_FEWER: Final = (
    "train fewer tables, for instance one for several features, or on fewer ranks and embedding "
    "servers: each of these names a chunk or more of each table of which it has rows"
)
_OR_FEWER: Final = f"store fewer bits: bits=, Precision(state=16) or 8. Or {_FEWER}"
#: Stands for a size that is known only to be too large.
_TOO_LARGE: Final = 1 << 40


class _TooLarge(NamedTuple):
    """What is too large, and what a person can do about it."""

    found: str
    next_step: str


class _Estimates(NamedTuple):
    """What is known of the next checkpoint's records.

    Attributes:
        key: what the estimates follow from: tables, precision and state.
        full: sizes of a full.
        largest_increment: sizes of an increment of all rows.
        refusal: why embedding servers cannot stage so many tables; None: they can.
    """

    key: object
    full: PartSizes
    largest_increment: PartSizes
    refusal: RecordTooLarge | None


class RecordBound:
    """Estimates the records of the coming checkpoints.

    Args:
        ranks: the ranks of the job.
        cutter: knows what a checkpoint of this rank would stage.
    """

    def __init__(self, ranks: Ranks, cutter: Cutter) -> None:
        self._ranks = ranks
        self._cutter = cutter
        self._estimate: _Estimates | None = None
        # By kind: tables, precision and state of a checkpoint that the agent rejected as too large.
        self._rejected: dict[Kind, object] = {}
        # Whether an increment of all rows may be too large, so that marked rows are counted.
        self._is_near = False

    def refuse_if_large(self) -> None:
        """Refuse a model of which no full can ever be committed. Collective.

        Raises:
            SettingsError: records of a full would exceed the limit; or embedding servers cannot
                stage so many tables.
        """
        with self._ranks.together("looking at the sizes of records"):
            try:
                self._refuse_long_description(self._staged(None, None))
            except RecordTooLarge as error:
                raise SettingsError(
                    "Staging(at_servers=True)",
                    found=error.found,
                    expected=error.expected,
                    next_step=error.next_step,
                ) from error
        whole, largest = self._joined(_AS_SET)
        self._is_near = not largest.fits
        fault = self._fault(whole)
        if fault is None:
            return
        next_step = fault.next_step
        for narrower in _NARROWER:
            fewer, _ = self._joined(narrower)
            if self._fault(fewer) is None:
                next_step = f"set {narrower}, with which the manifest takes about "
                next_step += f"{fewer.manifest_bytes:,} bytes"
                break
        raise SettingsError(
            "Checkpointer(model)", found=fault.found, expected=_expected(), next_step=next_step
        )

    def measure(self, precision: ChosenPrecision | None = None) -> None:
        """Estimate the records of the next checkpoint now, so that its stall need not."""
        parts = self._cutter.parts_of_full(None, precision)
        key = self._key([part.spec for part in parts], precision)
        self._estimate = self._estimated(key, [part.staged for part in parts])

    def warn_if_large(self, precision: ChosenPrecision | None) -> None:
        """Measure again, and log an error if no full of this rank can be committed. Never raises.

        Called when optimizers have created state, often long before the next checkpoint is due.
        """
        try:
            self.measure(precision)
        except Exception as error:
            # A user's state or a driver failed. The cut meets the same error and counts it.
            _log.warning("the sizes of records could not be estimated: %s", error)
            return
        assert self._estimate is not None
        fault = self._fault(self._estimate.full)
        if fault is not None:
            _log.error("%s", _too_large(fault))

    def needs(
        self, link: ChainLink, tables: Sequence[LiveTable], precision: ChosenPrecision | None
    ) -> RecordNeeds:
        """Return what this rank would write into records at a cut now.

        Args:
            link: the checkpoint's place in its chain.
            tables: the tables as they are now.
            precision: decision of the rule on precision; None: there is none.

        Raises:
            RecordTooLarge: this rank's job file would be too large; or embedding servers cannot
                stage so many tables.
        """
        key = self._key([live.spec for live in tables], precision)
        estimate = self._estimate
        if estimate is None or estimate.key != key:
            estimate = self._estimate = self._estimated(key, self._staged(tables, precision))
        full, increment = estimate.full, estimate.largest_increment
        if estimate.refusal is not None:
            raise estimate.refusal
        if (fault := self._fault_of_own(full)) is not None:
            raise _too_large(fault)
        if link.kind == "increment" and self._is_near:
            counts = self._cutter.marked_counts(tables)
            increment = self._sizes(_increment(self._staged(tables, precision), counts))
        return RecordNeeds(
            _TOO_LARGE if self._rejected.get("increment") == key else increment.entries_bytes,
            _TOO_LARGE if self._rejected.get("full") == key else full.entries_bytes,
            full.tables_bytes,
            full.parts_bytes if self._has_parts else 0,
        )

    def fitting(self, link: ChainLink, needs: Sequence[RecordNeeds]) -> ChainLink:
        """Return the link, or that of a full if an increment would be too large.

        Args:
            link: the place in the chain that all ranks agree on.
            needs: what each rank would write, in rank order.

        Raises:
            RecordTooLarge: a full would be too large as well.
        """
        tables_bytes = max(rank_needs.tables_bytes for rank_needs in needs)
        increment_bytes = sum(rank_needs.increment_bytes for rank_needs in needs)
        if not manifest_fits(increment_bytes, tables_bytes):
            self._is_near = True
        elif link.kind == "increment":
            return link
        full_bytes = sum(rank_needs.full_bytes for rank_needs in needs)
        parts_bytes = sum(rank_needs.parts_bytes for rank_needs in needs)
        fault = ""
        if full_bytes >= _TOO_LARGE:
            fault = "the same tables as in a full that the agent rejected as too large"
        elif not manifest_fits(full_bytes, tables_bytes):
            fault = f"a full with a manifest of about {full_bytes + tables_bytes:,} bytes"
        elif parts_bytes > MAX_PARTS_BYTES:
            fault = f"a full with parts of about {parts_bytes:,} bytes together"
        if fault:
            raise _too_large(_TooLarge(fault, _OR_FEWER))
        return FULL

    def rejected(self, kind: Kind) -> None:
        """Note that the agent has rejected a checkpoint because a record of it is too large.

        Estimates are the least sizes, so a checkpoint with quantized rows may turn out larger. No
        further one of this kind is taken while tables, precision and state stay as they are.
        """
        if self._estimate is not None:
            self._rejected[kind] = self._estimate.key

    def _key(self, specs: Sequence[TableSpec], precision: ChosenPrecision | None) -> object:
        """Return what the estimates follow from. The same objects are compared by identity."""
        return tuple(specs), precision, self._cutter.state_bytes

    def _estimated(self, key: object, staged: Sequence[StagedTable]) -> _Estimates:
        full, increment = self._sizes(staged), self._sizes(_increment(staged, None))
        if not self._ranks.several:
            self._is_near = not increment.fits
        refusal = None
        try:
            self._refuse_long_description(staged)
        except RecordTooLarge as error:
            refusal = error
        return _Estimates(key, full, increment, refusal)

    @property
    def _has_parts(self) -> bool:
        return self._ranks.several or self._cutter.cache.staging_servers > 0

    def _fault(self, sizes: PartSizes) -> _TooLarge | None:
        """Return what is too large in the records of a full; None: nothing is."""
        if not sizes.fits:
            description = f"a full of {sizes.chunks:,} chunks or more, with a manifest of about "
            return _TooLarge(description + f"{sizes.manifest_bytes:,} bytes", _OR_FEWER)
        if self._has_parts and sizes.parts_bytes > MAX_PARTS_BYTES:
            description = f"a full with parts of about {sizes.parts_bytes:,} bytes together"
            return _TooLarge(description, _OR_FEWER)
        return self._fault_of_own(sizes)

    def _fault_of_own(self, sizes: PartSizes) -> _TooLarge | None:
        """Return what is too large in the files and records that one rank or server writes."""
        if self._has_parts and sizes.part_bytes > records.MAX_RECORD_BYTES:
            description = f"a full with a part of about {sizes.part_bytes:,} bytes"
            return _TooLarge(description, _OR_FEWER)
        return _fault_of_job(sizes)

    def _joined(self, narrower: _Narrower) -> tuple[PartSizes, PartSizes]:
        """Return the sizes of a full and of the largest increment, of all ranks. Collective."""
        staged = [narrower.of(table) for table in self._staged(None, None)]
        own_sizes = self._sizes(staged), self._sizes(_increment(staged, None))
        full, increment = own_sizes
        for rank, (other_full, other_increment) in enumerate(self._ranks.gather(own_sizes)):
            if rank != self._ranks.rank:
                full, increment = full.joined(other_full), increment.joined(other_increment)
        return full, increment

    def _staged(
        self, tables: Sequence[LiveTable] | None, precision: ChosenPrecision | None
    ) -> list[StagedTable]:
        """Return the tables of a full as this rank's job describes them."""
        return [part.staged for part in self._cutter.parts_of_full(tables, precision)]

    def _sizes(self, staged: Sequence[StagedTable]) -> PartSizes:
        """Return the sizes of this rank's part; rank 0 adds those of embedding servers."""
        sizes = part_sizes(staged, part=self._ranks.rank, state_bytes=self._cutter.state_bytes)
        server_count = self._cutter.cache.staging_servers
        if not server_count or self._ranks.rank:
            return sizes
        of_servers: dict[tuple[int, ...], int] = {}
        for server in range(server_count):
            # Rows are dealt to all servers in turn, so each has about as many.
            rows = tuple(
                max(1, table.spec.rows // server_count) * (server < table.spec.rows) * is_there
                for table, is_there in zip(staged, self._cutter.parts.at_servers, strict=True)
            )
            of_servers[rows] = of_servers.get(rows, 0) + 1
        for rows, servers in of_servers.items():
            of_server = part_sizes(
                [_scattered(table, count) for table, count in zip(staged, rows, strict=True)],
                part=self._ranks.count,
            )
            for _ in range(servers):
                sizes = sizes.joined(of_server)
        return sizes

    def _refuse_long_description(self, staged: Sequence[StagedTable]) -> None:
        if self._cutter.cache.staging_servers:
            try:
                refuse_long_description("the next checkpoint", staged)
            except HomeError as error:
                raise RecordTooLarge(
                    error.subject,
                    found=error.found,
                    expected=error.expected,
                    next_step=error.next_step,
                ) from error


def _scattered(table: StagedTable, rows: int) -> StagedTable:
    """Return a table as an embedding server stages it that has so many of its rows."""
    changes = {"first_row": 0, "shard_rows": rows, "row_count": rows, "all_rows": False}
    return table.model_copy(update={**changes, "scattered": True})


def _increment(staged: Sequence[StagedTable], counts: Sequence[int] | None) -> list[StagedTable]:
    """Return the tables of an increment.

    Args:
        staged: the tables of a full.
        counts: for each table, how many rows the increment has; None: all rows.
    """
    return [
        table.model_copy(update={"all_rows": False, "row_count": min(count, table.row_count)})
        for table, count in zip(staged, counts or [t.row_count for t in staged], strict=True)
    ]


def _expected() -> str:
    return (
        f"at most {records.MAX_RECORD_BYTES:,} bytes, the largest record that readers accept, and "
        f"{paging.MAX_MANIFEST_BYTES:,} of a manifest with its pages: about 4,000,000 chunks"
    )


def _fault_of_job(sizes: PartSizes) -> _TooLarge | None:
    if sizes.job_bytes <= records.MAX_RECORD_BYTES:
        return None
    description = (
        f"a full with a job file of about {sizes.job_bytes:,} bytes, which describes its tables"
    )
    return _TooLarge(description, "train fewer tables, for instance one for several features")


def _too_large(fault: _TooLarge) -> RecordTooLarge:
    return RecordTooLarge(
        "the next checkpoint",
        found=fault.found,
        expected=_expected(),
        next_step="nothing was staged, and no checkpoint will be until this changes: "
        + fault.next_step,
    )
