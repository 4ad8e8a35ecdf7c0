"""Which rank stores which rows: every table of a job, as this rank sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.tables import Table, TableDtype
from recpoint.errors import SettingsError
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Columns
from recpoint.trainer_plugin.ranks import Ranks

__all__ = ["Shard", "copies_of", "lay_out"]


class _Held(NamedTuple):
    """What a rank says of one of its tables."""

    key: str
    name: str
    table_rows: int
    dim: int
    dtype: TableDtype
    columns: tuple[int, int] | None
    first_row: int
    rows: int

    @property
    def form(self) -> tuple[object, ...]:
        return self.table_rows, self.dim, self.dtype, self.columns and self.columns[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A table of the job, or a piece of its columns, and which of its rows this rank stores.

    Attributes:
        table: has the rows that this rank stores; None: it stores none, because it holds none, or
            because a lower rank holds the same ones.
        copy: what is here of a table that every rank holds whole, and one of them stores.
    """

    seen: _Held  # of some rank that holds rows of it
    table: Table | None
    copy: Table | None

    @property
    def key(self) -> str:
        """As `Table.key`."""
        return self.seen.key

    @property
    def name(self) -> str:
        """As `Table.name`."""
        return self.seen.name

    @property
    def rows(self) -> int:
        """Rows of the whole table, over all ranks; as it is now, like the rest."""
        return self.seen.table_rows if self.table is None else self.table.table_rows

    @property
    def dim(self) -> int:
        """Values of a row."""
        return self.seen.dim if self.table is None else self.table.dim

    @property
    def dtype(self) -> TableDtype:
        """Of the values, by its stored name."""
        return self.seen.dtype if self.table is None else self.table.dtype

    @property
    def columns(self) -> Columns | None:
        """As `Table.columns`."""
        if self.seen.columns is None:
            return None
        first, of = self.seen.columns
        return Columns(first=first, of=of)

    @property
    def held_rows(self) -> int:
        """Rows that this rank stores."""
        return 0 if self.table is None else self.table.rows

    @property
    def first_row(self) -> int:
        """Position in the whole table of the first of them; 0 without any."""
        return 0 if self.table is None else self.table.first_row

    @property
    def held(self) -> range:
        """Positions in the whole table of the rows that this rank stores."""
        return range(self.first_row, self.first_row + self.held_rows)

    @property
    def weight(self) -> Tensor:
        """[held_rows, dim]: the live values."""
        if self.table is not None:
            return self.table.weight
        return torch.empty((0, self.dim), dtype=torch_dtype(self.dtype), device="cpu")


def lay_out(ranks: Ranks, tables: Sequence[Table]) -> tuple[Shard, ...]:
    """All tables of the job, in the same order on each rank. Collective.

    Args:
        ranks: of the job.
        tables: what this rank holds.

    Raises:
        SettingsError: ranks differ in a table's form, or its rows are not each in one shard.
        RankLost: a rank did not answer.
    """
    here = {table.key: table for table in tables}
    # Asked for a single process too: its tables have to be whole as well.
    held = [dict(one) for one in ranks.gather([(key, _held(t)) for key, t in here.items()])]
    found: list[Shard] = []
    for key in dict.fromkeys(key for one in held for key in one):
        by_rank = {rank: one[key] for rank, one in enumerate(held) if key in one}
        owners = _owners(key, by_rank)
        table = here[key] if ranks.rank in owners else None
        first = next(iter(by_rank.values()))
        everywhere = ranks.several and all(
            (rank in by_rank and by_rank[rank].rows == first.table_rows)
            for rank in range(ranks.count)
        )
        copy = here[key] if everywhere else None
        found.append(Shard(seen=first, table=table, copy=copy))
    return tuple(found)


def copies_of(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """The live values of the tables that every rank holds whole, by key."""
    return {shard.key: shard.copy.weight for shard in shards if shard.copy is not None}


def _held(table: Table) -> _Held:
    columns = table.columns
    return _Held(
        key=table.key,
        name=table.name,
        table_rows=table.table_rows,
        dim=table.dim,
        dtype=table.dtype,
        columns=None if columns is None else (columns.first, columns.of),
        first_row=table.first_row,
        rows=table.rows,
    )


def _owners(key: str, by_rank: dict[int, _Held]) -> set[int]:
    """The ranks that store a table: of those that hold the same rows the lowest.

    One that lists it without rows stores nothing of it, wherever its shard would begin.
    """
    forms = {held.form for held in by_rank.values()}
    if len(forms) > 1:
        raise _refused(key, f"different forms on ranks {_listed(by_rank)}: {forms}", "one form")
    by_rows: dict[tuple[int, int], int] = {}
    for rank, held in sorted(by_rank.items()):
        if held.rows:
            by_rows.setdefault((held.first_row, held.rows), rank)
    end, rows = 0, next(iter(by_rank.values())).table_rows
    for (first, count), rank in sorted(by_rows.items()):
        if first != end:
            raise _refused(
                key,
                f"rows from {first} on rank {rank}, after those up to {end}",
                "each row on one rank, or the same rows on several",
            )
        end = first + count
    if end != rows:
        raise _refused(key, f"the first {end} rows of {rows}, on all ranks", "every row")
    return set(by_rows.values())


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _refused(key: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        f"table {key!r}",
        found=found,
        expected=f"{expected}, over all ranks of the job",
        next_step="give each rank the model that it trains; replicas have to be whole",
    )
