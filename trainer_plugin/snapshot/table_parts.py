"""Describes the tables of a cut as they are stored: how many bits, by which method, in codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from recpoint.embeddings.home.initial import Initial, stored_rule
from recpoint.embeddings.tables.marks import Dirty
from recpoint.format.dtypes import item_bytes
from recpoint.format.first_values import FirstValueRule
from recpoint.format.history import RULE_BITS, ChosenPrecision
from recpoint.format.job import Allocation
from recpoint.format.manifest import CODE_BITS, MeasuredLoss, Quantizer
from recpoint.kernels import dirty_bitmap
from recpoint.kernels.bit_packing.widths import packed_width
from recpoint.trainer_plugin.policy import ChainLink
from recpoint.trainer_plugin.ranks.sharding import StoredShard
from recpoint.trainer_plugin.schedule.ledger import Pending
from recpoint.trainer_plugin.schedule.outlook import in_bits, table_widths
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot.cache_at_cut import CacheAtCut
from recpoint.trainer_plugin.snapshot.codes import RowsToCode, TableQuantizer
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.plan import CutTable

__all__ = ["PricesBits", "TableParts"]


class PricesBits(Protocol):
    """Says how the agent gives widths to the rows of tables; `loss.meter.LossMeter` does."""

    def allocation(self, live: LiveTable) -> Allocation | None:
        """Return how the rows of a table get widths; None: all get the same."""

    def is_exact(self, live: LiveTable) -> bool:
        """Whether the rows of a table are stored exactly, whatever its width is."""

    @property
    def record(self) -> MeasuredLoss:
        """What was measured, as records have it."""

    def told(self) -> tuple[int, ...]:
        """Return what this rank tells the others when they agree on a checkpoint."""

    def agree(self, told: Sequence[Sequence[int]]) -> None:
        """Decide about the price as all ranks do; `told` is what each has told."""


class TableParts:
    """Describes what this rank stores of each table in a cut.

    Args:
        shards: all tables of the job, in the order in which they are stored.
        settings: how rows and row states are stored.
        cache: says which tables embedding servers stage.
        rank: rank of this process.
        prices: gives rows their widths; None: all rows of a table have one width.
        rules: returns how new rows of a grown table began, by its name; None: it has not grown.

    Attributes:
        rule: whether the width of any table is chosen anew for each cut.
        at_servers: whether embedding servers stage the rows of each table.

    Raises:
        SettingsError: `Precision.tables` names a table that does not exist or is not trained.
    """

    def __init__(
        self,
        shards: Sequence[StoredShard],
        settings: Settings,
        cache: CacheAtCut,
        rank: int,
        prices: PricesBits | None = None,
        rules: Callable[[str], Initial | None] = lambda _: None,
    ) -> None:
        self._shards = tuple(shards)
        self._rules = rules
        self._precision = settings.precision
        self._cache = cache
        self._rank = rank
        self._prices = prices
        self._widths = table_widths(
            [shard.table for shard in shards if shard.table is not None],
            settings.precision,
            names={shard.name for shard in shards},
        )
        self._quantizer = TableQuantizer([shard.table for shard in shards], settings.precision)
        self._at_servers = settings.staging.at_servers
        self.rule = None in self._widths.values()
        self.at_servers = tuple(
            self._at_servers
            and shard.table is not None
            and shard.table.cached
            and not shard.table.own_states
            for shard in shards
        )

    @property
    def measured_loss(self) -> MeasuredLoss | None:
        """What rounding costs in loss now; None: nobody asked for that."""
        return None if self._prices is None else self._prices.record

    def measured_here(self) -> tuple[int, ...]:
        """Return what other ranks must hear of what this rank has measured; see `PricesBits`."""
        return () if self._prices is None else self._prices.told()

    def agree_on_prices(self, told: Sequence[Sequence[int]]) -> None:
        """Take the prices that follow from what all ranks have measured."""
        if self._prices is not None:
            self._prices.agree(told)

    def prepare(self) -> None:
        """Compile what the cut quantizes with. Called before training."""
        self._quantizer.prepare(self._widths)

    def remember_quantizers(self, stored: Pending, quantizers: Sequence[Quantizer]) -> None:
        """Remember the quantizers of the tables of a checkpoint that is stored."""
        own_quantizers = [quantizer for quantizer in quantizers if quantizer.rank == self._rank]
        self._quantizer.remember(stored, own_quantizers)

    def part(
        self,
        live: LiveTable,
        row_count: int,
        dirty: Dirty | None = None,
        precision: ChosenPrecision | None = None,
    ) -> CutTable:
        """Return the part of a table that holds so many of its rows.

        Args:
            live: the table as it is now.
            row_count: number of rows to store.
            dirty: marks of these rows; None: all rows.
            precision: decision of the rule; None: there is none.
        """
        width: int = 8 * item_bytes(live.spec.dtype)
        prices, allocation = self._prices, None
        if live.table is not None and not (prices is not None and prices.is_exact(live)):
            chosen = in_bits(self._widths[live.key], precision)
            # Exact means the width of the present dtype: `model.half()` may have changed it.
            width = chosen if chosen in CODE_BITS else width
            allocation = None if prices is None else prices.allocation(live)
        in_cache = None if live.table is None else live.table.name_in_cache
        return CutTable(
            spec=live.spec,
            held=live.held,
            values=live.weight,
            row_states=live.row_states,
            bitmap=dirty.bitmap if dirty is not None and row_count < len(live.held) else None,
            row_count=row_count,
            bits=width,
            quantizer=self._precision.quantizer,
            state_bits=None if self._precision.state == "lossless" else self._precision.state,
            in_cache=in_cache,
            states_here=0 if live.table is None or in_cache is None else len(live.table.own_states),
            at_servers=in_cache in self._cache.staged_at_home,
            allocation=allocation,
        )

    def whole(self, live: LiveTable, precision: ChosenPrecision | None = None) -> CutTable:
        """Return the part of a table in a full; embedding servers stage theirs."""
        part = self.part(live, len(live.held), None, precision)
        # Those that no step has changed yet will be there when a full is cut.
        may_be_there = part.in_cache is not None and not part.states_here
        return replace(part, at_servers=self._at_servers and may_be_there)

    def base_bytes(self, tables: Sequence[LiveTable]) -> int:
        """Return the bytes of codes that the agent keeps of a full's rows, for residuals."""
        parts = [self.whole(live) for live in tables] if self._precision.residual else []
        return sum(
            part.rows_here * (packed_width(part.spec.dim, part.bits) + 2 * item_bytes("F32"))
            for part in parts
            if part.may_be_residual
        )

    def of_full(
        self, tables: Sequence[LiveTable], precision: ChosenPrecision | None
    ) -> list[CutTable]:
        """Return the parts of this rank in a full; embedding servers stage theirs.

        Args:
            tables: the tables.
            precision: decision of the rule; None: the fewest bits that it may choose.
        """
        parts = []
        for live in tables:
            part = self.whole(live, precision)
            if precision is None and live.table is not None and self._widths[live.key] is None:
                part = replace(part, bits=min(RULE_BITS))
            parts.append(part)
        return parts

    def quantize(self, parts: list[CutTable], link: ChainLink, step: int) -> None:
        """Set how the rows of each part are stored, as far as that follows from the chain.

        This is the method of quantization, if it is known; and in a full the rule of first values,
        because the agent leaves out rows that it gives. Parts whose rows are quantized in this
        process get codes instead of values. Parts that the agent stores as residuals keep their
        values: it chooses the method on residuals. So do parts whose rows get widths by a price.
        """
        for index, (shard, part) in enumerate(zip(self._shards, parts, strict=True)):
            if link.base is None and part.is_quantized:
                part = parts[index] = replace(part, first_values=self._rule(shard, part))
            if link.base is not None and self._precision.residual and part.may_be_residual:
                parts[index] = replace(part, residual=True)
            elif shard.table is not None and part.allocation is None:
                method = self._quantizer.method(shard.table, part.bits, base=link.base, step=step)
                if method is not None:
                    parts[index] = replace(part, method=method)
        if self._quantizer.wanted:
            self._code(parts)

    def _rule(self, shard: StoredShard, part: CutTable) -> FirstValueRule | None:
        """Return the rule of rows that began by one; None: checkpoints cannot name one."""
        if shard.table is None:
            return None
        in_cache = self._cache.rule_of(part.in_cache)
        return in_cache or stored_rule(self._rules(shard.table.name), shard.table.name)

    def _code(self, parts: list[CutTable]) -> None:
        requests: dict[int, RowsToCode] = {}
        for index, (shard, part) in enumerate(zip(self._shards, parts, strict=True)):
            table = shard.table
            if table is None or part.method is None or part.row_count == 0:
                continue
            if not self._quantizer.may(table, part.bits):
                continue
            ids = part.ids
            if ids is None and part.bitmap is not None:
                ids = dirty_bitmap.collect(part.bitmap, rows=len(part.held))
                parts[index] = replace(part, ids=ids)
            requests[index] = RowsToCode(table, part.bits, part.method, ids, part.row_count)
        for index, codes in zip(requests, self._quantizer.codes([*requests.values()]), strict=True):
            parts[index] = replace(parts[index], codes=codes, first_values=None)
