"""Decides which rank stores which rows of tables and which pieces of dense tensors.

Which rank stores which pieces of dense tensors that lie on several meshes. The ranks of a mesh
together hold a tensor that lies on it. Another mesh may hold the same tensor again. With data and
tensor parallelism, these are the meshes `mesh["tp"]` of all replicas, and the meshes `mesh["dp"]`
of a layer that is in no tensor-parallel plan. The mesh that contains the lowest rank stores the
tensor and its optimizer state. Inside a mesh that replicates, `tables.piece_of` chooses the rank.
All this is decided when training starts, so that a cut needs no exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.restore.dense import fault_of_boxes, is_shard
from recpoint.embeddings.tables.tables import Table, TableDtype
from recpoint.errors import SettingsError
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Columns
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.tables import is_piece, piece_of

__all__ = [
    "HeldPiece",
    "StoredShard",
    "balance",
    "copies_of",
    "held_pieces",
    "lay_out",
    "local_pieces",
    "stored_elsewhere",
    "without_pieces",
]


class _HeldTable(NamedTuple):
    """A rank's description of one of its tables, for the other ranks."""

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
class StoredShard:
    """A table of the job, or some of its columns, and the rows of it that this rank stores.

    Attributes:
        seen: description by the lowest rank that lists the table.
        table: the table with the rows that this rank stores; None: it stores none, because it holds
            none, or because a lower rank holds the same rows.
        copy: this rank's copy of a table that every rank holds whole; None: the table is sharded,
            or the job has one rank.
    """

    seen: _HeldTable
    table: Table | None
    copy: Table | None

    @property
    def key(self) -> str:
        """Key of the table, as in `Table.key`."""
        return self.seen.key

    @property
    def name(self) -> str:
        """Name of the whole table, as in `Table.name`."""
        return self.seen.name

    @property
    def rows(self) -> int:
        """Number of rows of the whole table, over all ranks, at present."""
        return self.seen.table_rows if self.table is None else self.table.table_rows

    @property
    def dim(self) -> int:
        """Number of values in a row."""
        return self.seen.dim if self.table is None else self.table.dim

    @property
    def dtype(self) -> TableDtype:
        """Dtype of the values, by its stored name."""
        return self.seen.dtype if self.table is None else self.table.dtype

    @property
    def columns(self) -> Columns | None:
        """Columns of the whole table, as in `Table.columns`; None: all."""
        if self.seen.columns is None:
            return None
        first, column_count = self.seen.columns
        return Columns(first=first, of=column_count)

    @property
    def held_rows(self) -> int:
        """Number of rows that this rank stores."""
        return 0 if self.table is None else self.table.rows

    @property
    def first_row(self) -> int:
        """Position in the whole table of the first row that this rank stores; 0 if it has none."""
        return 0 if self.table is None else self.table.first_row

    @property
    def held(self) -> range:
        """Positions in the whole table of the rows that this rank stores."""
        return range(self.first_row, self.first_row + self.held_rows)

    @property
    def weight(self) -> Tensor:
        """The live values: [held_rows, dim]."""
        if self.table is not None:
            return self.table.weight
        return torch.empty((0, self.dim), dtype=torch_dtype(self.dtype), device="cpu")


def lay_out(ranks: Ranks, tables: Sequence[Table]) -> tuple[StoredShard, ...]:
    """Lay out all tables of the job, in the same order on each rank. Collective.

    Args:
        ranks: the ranks of the job.
        tables: the tables that this rank holds.

    Raises:
        SettingsError: a table's form differs between ranks; or its shards leave out rows, or
            overlap without being equal.
        RankLost: a rank did not answer.
    """
    own_tables = {table.key: table for table in tables}
    # Checked for a single process, too, because its tables must also be whole.
    tables_of_ranks = [
        dict(pairs) for pairs in ranks.gather([(key, _held(t)) for key, t in own_tables.items()])
    ]
    shards: list[StoredShard] = []
    for key in dict.fromkeys(key for tables_of_rank in tables_of_ranks for key in tables_of_rank):
        by_rank = {
            rank: tables_of_rank[key]
            for rank, tables_of_rank in enumerate(tables_of_ranks)
            if key in tables_of_rank
        }
        owners = _owners(key, by_rank)
        table = own_tables[key] if ranks.rank in owners else None
        first = next(iter(by_rank.values()))
        everywhere = ranks.several and all(
            (rank in by_rank and by_rank[rank].rows == first.table_rows)
            for rank in range(ranks.count)
        )
        copy = own_tables[key] if everywhere else None
        shards.append(StoredShard(seen=first, table=table, copy=copy))
    return tuple(shards)


def copies_of(shards: Sequence[StoredShard]) -> dict[str, Tensor]:
    """Return the live values of the tables that every rank holds whole, by key."""
    return {shard.key: shard.copy.weight for shard in shards if shard.copy is not None}


def _held(table: Table) -> _HeldTable:
    columns = table.columns
    return _HeldTable(
        key=table.key,
        name=table.name,
        table_rows=table.table_rows,
        dim=table.dim,
        dtype=table.dtype,
        columns=None if columns is None else (columns.first, columns.of),
        first_row=table.first_row,
        rows=table.rows,
    )


def _owners(key: str, by_rank: dict[int, _HeldTable]) -> set[int]:
    """Return the ranks that store a table: for each range of rows, the lowest rank that holds it.

    A rank that lists the table without rows stores nothing, wherever its shard would begin.
    """
    forms = {seen_table.form for seen_table in by_rank.values()}
    if len(forms) > 1:
        raise _refused(key, f"different forms on ranks {_listed(by_rank)}: {forms}", "one form")
    by_rows: dict[tuple[int, int], int] = {}
    for rank, seen_table in sorted(by_rank.items()):
        if seen_table.rows:
            by_rows.setdefault((seen_table.first_row, seen_table.rows), rank)
    end, rows = 0, next(iter(by_rank.values())).table_rows
    for (first, count), rank in sorted(by_rows.items()):
        if first != end:
            raise _refused(
                key,
                f"rows from {first} on rank {rank}, after rows up to {end}",
                "each row on one rank, or the same rows on several ranks",
            )
        end = first + count
    if end != rows:
        raise _refused(key, f"only the first {end} rows of {rows}", "every row")
    return set(by_rows.values())


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _refused(key: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        f"table {key!r}",
        found=found,
        expected=f"{expected}, over all ranks of the job",
        next_step="give each rank the model that it trains; replicas must be whole",
    )


class HeldPiece(NamedTuple):
    """A rank's description of a tensor of which it holds a piece.

    Attributes:
        form: shape of the whole tensor, and its dtype.
        mesh: the lowest rank of the mesh on which the tensor lies.
        box: start and shape of the piece; None: another rank of the mesh stores it.
    """

    form: tuple[tuple[int, ...], str]
    mesh: int
    box: tuple[tuple[int, ...], tuple[int, ...]] | None


def held_pieces(tensors: Mapping[str, Tensor]) -> dict[str, HeldPiece]:
    """Describe the pieces that this rank holds of split dense tensors, by name."""
    pieces: dict[str, HeldPiece] = {}
    for name, tensor in tensors.items():
        if is_piece(tensor):
            piece = piece_of(tensor)
            pieces[name] = HeldPiece(
                form=(tuple(tensor.shape), str(tensor.dtype)),
                mesh=int(tensor.device_mesh.mesh.min()),
                box=None if piece is None else (tuple(piece["at"]), tuple(piece["tensor"].shape)),
            )
    return pieces


def local_pieces(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the live values of the pieces that this rank holds, by name."""
    return {
        name: tensor.to_local().detach() for name, tensor in tensors.items() if is_piece(tensor)
    }


def stored_elsewhere(
    pieces_of_ranks: Sequence[Mapping[str, HeldPiece]], rank: int
) -> frozenset[str]:
    """Return the names of tensors of which other ranks store everything that this rank holds.

    Args:
        pieces_of_ranks: the pieces of each rank, in rank order.
        rank: this rank.

    Raises:
        SettingsError: a rank has no piece of a tensor, or another shape; or the stored pieces would
            not make up the tensor.
    """
    checked_layouts: set[object] = set()  # layers of one shape are cut alike
    for name in sorted(set().union(*pieces_of_ranks)):
        by_rank = [of_rank.get(name) for of_rank in pieces_of_ranks]
        layout = tuple(by_rank)
        if layout not in checked_layouts:
            fault = _fault(by_rank)
            if fault is not None:
                raise SettingsError(
                    f"the dense tensor {name!r}, of which ranks have pieces",
                    found=fault,
                    expected="pieces that make up the whole tensor on each mesh on which it lies",
                    next_step="give each rank the model that it trains, and divide each layer in "
                    "the same way on all ranks",
                )
            checked_layouts.add(layout)
    return frozenset(
        name
        for name, piece in pieces_of_ranks[rank].items()
        if piece.mesh != min(of_rank[name].mesh for of_rank in pieces_of_ranks)
    )


def balance(pieces_of_ranks: Sequence[Mapping[str, HeldPiece]], rank: int) -> dict[str, int]:
    """Return a factor for each piece held here, so that equal pieces cancel out over all ranks.

    Each rank multiplies a number that it computes from a piece by the factor. If pieces of the same
    place are equal, the products add up to 0 over all ranks: a copy that is not stored has factor
    1, and the stored piece has minus the number of its copies. Tensors on one mesh, and pieces of a
    mesh that is cut differently, have no factor; their values are not compared.

    Args:
        pieces_of_ranks: the pieces of each rank, in rank order; `stored_elsewhere` has found no
            fault in them.
        rank: this rank.
    """
    balances: dict[str, int] = {}
    for name, own_piece in pieces_of_ranks[rank].items():
        by_rank = [of_rank[name] for of_rank in pieces_of_ranks]
        first = min(piece.mesh for piece in by_rank)
        stored = {piece.box for piece in by_rank if piece.mesh == first}
        if own_piece.box is None or own_piece.box not in stored:
            continue
        copies = sum(piece.mesh != first and piece.box == own_piece.box for piece in by_rank)
        if copies:
            balances[name] = 1 if own_piece.mesh != first else -copies
    return balances


def _fault(by_rank: Sequence[HeldPiece | None]) -> str | None:
    forms: dict[object, list[int]] = {}
    for rank, piece in enumerate(by_rank):
        forms.setdefault(None if piece is None else piece.form, []).append(rank)
    if len(forms) > 1:
        return "; ".join(f"{form or 'no piece'} on ranks {on}" for form, on in forms.items())
    present = [piece for piece in by_rank if piece is not None]
    first = min(piece.mesh for piece in present)
    boxes = [
        [range(a, a + n) for a, n in zip(*piece.box, strict=True)]
        for piece in present
        if piece.mesh == first and piece.box is not None
    ]
    return fault_of_boxes(present[0].form[0], boxes)


def without_pieces(tree: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a rank's state tree without the pieces of these tensors and of their optimizer state.

    State that is not a piece stays, such as a count of steps that each rank has.
    """
    tensors = {
        name: value
        for name, value in tree["model"]["tensors"].items()
        if name not in names or not is_shard(value)
    }
    optimizers = []
    for optimizer in tree["optimizers"]:
        state = {
            name: _without(entry) if name in names else entry
            for name, entry in optimizer["state"].items()
        }
        optimizers.append({**optimizer, "state": state})
    return {**tree, "model": {**tree["model"], "tensors": tensors}, "optimizers": optimizers}


def _without(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in entry["values"].items() if not is_shard(value)}
    return {**entry, "values": values}
