"""Parts of tables: what is read for them, what becomes of row states, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint.catalog.restore.placement import PartsTarget, TablePart, map_parts
from recpoint.catalog.restore.restore import MemoryTarget, TableTarget, restore
from recpoint.catalog.restore.rows import logical_tables
from recpoint.catalog.run.run import Run
from recpoint.errors import IncompatibleModel
from recpoint.format.manifest import Manifest
from recpoint.kernels import dirty_bitmap
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.interposed_store import InterposedStore
from tests.resharding import empty_part, rank_of_rows


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path)
    run.claim(None)
    return run


def wide(rows: int = 40, dim: int = 8) -> Table:
    """A table with a state a value and one a row."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, dim, generator=generator)
    states = (torch.rand(rows, dim, generator=generator), torch.rand(rows, generator=generator))
    return Table("items", values, states, state_names=("moment", "sum"))


def stored(run: Run, pieces: list[Table], *, ranks: int = 1) -> Manifest:
    owners = None
    if ranks > 1:
        edges = [table.rows * rank // ranks for table in pieces[:1] for rank in range(1, ranks)]
        owners = [rank_of_rows(table.rows, edges) for table in pieces]
    return publish(
        run, build(run, pieces, step=5, generation=1, ranks=ranks, owners=owners, rows_per_chunk=5)
    )


def test_only_pieces_and_rows_that_are_wanted_are_read(run: Run) -> None:
    table = wide()
    manifest = stored(run, table.cut([2, 6]), ranks=4)  # rows 0 … 9, 10 … 19, …; 5 a chunk
    store = InterposedStore(run.store)
    part = empty_part(table, range(10, 20), range(3, 6))
    report = restore(Run.open(store), PartsTarget([part]))
    entries = {entry.key: entry for entry in manifest.chunks}
    read = [entries[key] for call, key in store.calls if call == "get" and key in entries]
    assert [(entry.table, entry.rank, entry.row_count) for entry in read] == [(1, 1, 5), (1, 1, 5)]
    assert report.bytes_read == sum(entry.bytes for entry in read)
    assert torch.equal(part.values, table.values[10:20, 3:6])


def test_a_part_with_the_boundaries_of_a_piece_is_written_in_place(run: Run) -> None:
    table = wide()
    manifest = stored(run, table.cut([4]))
    aligned = empty_part(table, range(8, 20), range(4, 8), states=("moment", "sum"))
    strided = empty_part(table, range(8, 20), range(4), padding=1)
    into = map_parts(manifest, [aligned, strided])
    assert isinstance(into[1], TableTarget) and not isinstance(into[0], TableTarget)
    assert into[1].values.data_ptr() == aligned.values.data_ptr()
    restore(run, PartsTarget([aligned, strided]))
    assert torch.equal(aligned.values, table.values[8:20, 4:])
    assert torch.equal(strided.values, table.values[8:20, :4])


class TestStatesOfWholeRows:
    """A state of one value a row, of which each piece has its own."""

    def test_the_same_boundaries_have_the_same_bits(self, run: Run) -> None:
        table = wide()
        pieces = table.cut([2, 6], averaged=[1])
        stored(run, pieces)
        parts = [
            empty_part(table, range(40), range(first, stop), states=("sum",))
            for first, stop in ((0, 2), (2, 6), (6, 8))
        ]
        restore(run, PartsTarget(parts))
        for part, piece in zip(parts, pieces, strict=True):
            assert torch.equal(part.row_states["sum"], piece.states[1])

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
    def test_the_whole_has_the_mean_by_columns(self, run: Run, order: tuple[int, ...]) -> None:
        table = wide()
        pieces = table.cut([2, 5], averaged=[1])  # of 2, 3 and 3 columns
        stored(run, [pieces[i] for i in order])
        target = MemoryTarget()
        restore(run, target)
        sums = [piece.states[1].double() * piece.dim for piece in pieces]
        found = target.tables["items"].row_states[1]
        assert found is not None
        # Rounded once a piece: to half a unit in the last place each.
        torch.testing.assert_close(found.double(), sum(sums) / 8, rtol=3 * 2**-24, atol=0)

    def test_a_part_across_pieces_counts_the_columns_that_it_has(self, run: Run) -> None:
        table = wide()
        pieces = table.cut([2, 5], averaged=[1])
        stored(run, pieces)
        part = empty_part(table, range(7, 31), range(1, 4), states=("sum",))
        restore(run, PartsTarget([part]))
        expected = (pieces[0].states[1].double() + 2 * pieces[1].states[1].double()) / 3
        torch.testing.assert_close(
            part.row_states["sum"].double(), expected[7:31], rtol=2 * 2**-24, atol=0
        )

    def test_pieces_that_agree_leave_the_value_as_it_was(self, run: Run) -> None:
        table = wide(dim=7)
        table.states[1][3] = torch.inf
        table.states[1][4] = torch.nan
        stored(run, table.cut([1, 4]))
        target = MemoryTarget()
        restore(run, target)
        found = target.tables["items"].row_states[1]
        assert found is not None
        assert torch.equal(found.view(torch.int32), table.states[1].view(torch.int32))

    def test_of_counters_the_largest_counts(self, run: Run) -> None:
        table = wide()
        table.states, table.state_names = (torch.arange(40),), ("steps",)
        stored(run, table.cut([4], averaged=[0]))
        target = MemoryTarget()
        restore(run, target)
        found = target.tables["items"].row_states[0]
        assert found is not None and torch.equal(found, 2 * torch.arange(40))


def test_rows_of_increments_are_marked_in_the_part(run: Run) -> None:
    table = wide()
    pieces = table.cut([4])
    full = stored(run, pieces)
    some, others = torch.tensor([1, 12, 19]), torch.tensor([13, 30])
    publish(run, build(run, pieces, step=6, generation=1, parent=full, dirty=[some, others]))
    parts = [
        TablePart(
            table="items",
            values=torch.empty(10, 8),
            first_row=first,
            changed=dirty_bitmap.new(10),
        )
        for first in (10, 30)
    ]
    restore(run, PartsTarget(parts))
    marked = [
        dirty_bitmap.collect(part.changed, rows=10).tolist()
        for part in parts
        if part.changed is not None
    ]
    assert marked == [[2, 3, 9], [0]]


def test_parts_of_one_table_may_overlap(run: Run) -> None:
    table = wide()
    stored(run, table.cut([4]))
    parts = [empty_part(table, range(30), range(6)), empty_part(table, range(20, 40), range(2, 8))]
    restore(run, PartsTarget(parts))
    assert torch.equal(parts[0].values, table.values[:30, :6])
    assert torch.equal(parts[1].values, table.values[20:, 2:])


#: Where each of a sharding's ranks cuts rows and columns: ranks of rows, ranks of columns.
SHARDINGS = {
    "row-wise of 4": ([10, 20, 30], []),
    "row-wise of 3, uneven": ([1, 27], []),
    "table-wise": ([], []),
    "column-wise of 2": ([], [3]),
    "column-wise of 4": ([], [1, 2, 7]),
    "table-row-wise in columns": ([15], [4]),
}


def test_from_one_sharding_to_the_next(run: Run) -> None:
    """Each restores the one before it, each of its ranks by itself, and stores what it has."""
    source = wide()
    names = ("moment", "sum")
    pieces, owners = source.cut([]), [torch.zeros(40, dtype=torch.int64)]
    order = [*SHARDINGS.values(), *reversed(SHARDINGS.values()), ([], [])]
    for step, (row_edges, column_edges) in enumerate(order, start=1):
        publish(run, build(run, pieces, step=step, generation=1, ranks=8, owners=owners))
        row_ends, column_ends = [0, *row_edges, 40], [0, *column_edges, 8]
        parts = [
            [
                empty_part(source, range(top, bottom), range(first, stop), states=names)
                for top, bottom in zip(row_ends, row_ends[1:], strict=False)
            ]
            for first, stop in zip(column_ends, column_ends[1:], strict=False)
        ]
        for part in (part for of_columns in parts for part in of_columns):
            restore(run, PartsTarget([part]))
        pieces = source.cut(column_edges)
        for piece, of_columns in zip(pieces, parts, strict=True):
            piece.values = torch.cat([part.values for part in of_columns])
            piece.states = tuple(
                torch.cat([part.row_states[name] for part in of_columns]) for name in names
            )
        owners = [rank_of_rows(40, row_edges) for _ in pieces]
    (found,) = pieces
    assert torch.equal(found.values, source.values)
    for state, expected in zip(found.states, source.states, strict=True):
        assert torch.equal(state, expected)


BAD: list[tuple[TablePart, str]] = [
    (TablePart(table="item", values=torch.empty(1, 1)), "no such table"),
    (TablePart(table="items", values=torch.empty(41, 8)), "rows 0 … 40 wanted"),
    (TablePart(table="items", values=torch.empty(2, 8), first_row=39), "rows 39 … 40 wanted"),
    (TablePart(table="items", values=torch.empty(2, 8), first_row=-1), "rows -1 … 0 wanted"),
    (TablePart(table="items", values=torch.empty(2, 9)), "columns 0 … 8 wanted"),
    (TablePart(table="items", values=torch.empty(2, 2), first_column=7), "columns 7 … 8 wanted"),
    (TablePart(table="items", values=torch.empty(2, 2), first_column=-1), "columns -1 … 0 wanted"),
    (TablePart(table="items", values=torch.empty(2, 2).double()), "torch.float64"),
    (TablePart(table="items", values=torch.empty(2)), r"\(2,\)"),
    (
        TablePart(table="items", values=torch.empty(2, 3), row_states={"momentum": torch.ones(2)}),
        "row state 'momentum' wanted",
    ),
    (
        TablePart(table="items", values=torch.empty(2, 3), row_states={"moment": torch.ones(2, 8)}),
        r"moment: torch.float32 \(2, 8\)",
    ),
    (
        TablePart(table="items", values=torch.empty(2, 3), row_states={"sum": torch.ones(2, 3)}),
        r"sum: torch.float32 \(2, 3\)",
    ),
]


@pytest.mark.parametrize(("part", "found"), BAD, ids=[found for _, found in BAD])
def test_a_part_that_is_none_is_refused(run: Run, part: TablePart, found: str) -> None:
    stored(run, wide().cut([4]))
    good = TablePart(table="items", values=torch.full((2, 8), 7.0))
    with pytest.raises(IncompatibleModel, match=found):
        restore(run, PartsTarget([good, part]))
    assert bool((good.values == 7).all())


def test_pieces_whose_row_states_differ_are_named(run: Run) -> None:
    one, other = wide().cut([4])
    other.states, other.state_names = other.states[:1], ("moment",)
    manifest = stored(run, [one, other])
    with pytest.raises(IncompatibleModel, match="row states that differ between its pieces"):
        restore(run, MemoryTarget())
    part = TablePart(table="items", values=torch.empty(40, 8))
    restore(run, PartsTarget([part]))
    assert torch.equal(part.values, wide().values)
    other.states, other.state_names = (other.states[0], torch.rand(40, 3)), ("moment", "sum")
    bad = build(run, [one, other], step=6, generation=1).manifest
    with pytest.raises(IncompatibleModel, match="'sum' of"):
        _ = logical_tables(bad.tables)["items"].row_states
    assert logical_tables(manifest.tables)["items"].dim == 8


def test_a_column_of_a_table_without_pieces(run: Run) -> None:
    table = tables()[0]
    stored(run, [table])
    part = empty_part(table, range(3, 9), range(1, 2), states=("state0", "state1"))
    restore(run, PartsTarget([part]))
    assert torch.equal(part.values, table.values[3:9, 1:2])
    assert torch.equal(part.row_states["state0"], table.states[0][3:9, 1:2])
    assert torch.equal(part.row_states["state1"], table.states[1][3:9])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", [None, 4])
def test_parts_on_a_device(run: Run, bits: int | None) -> None:
    table = wide()
    pieces = table.cut([2, 5], averaged=[1])
    for piece in pieces:
        piece.bits = bits
    full = stored(run, pieces, ranks=2)
    ids = torch.tensor([0, 7, 8, 31])
    dirty = [ids, ids[:1], ids[1:]]
    made = build(run, pieces, step=6, generation=1, parent=full, dirty=dirty, ranks=2)
    publish(run, made)
    here, there = (
        TablePart(
            table="items",
            values=torch.zeros(20, 5, device=device),
            row_states={
                "moment": torch.zeros(20, 5, device=device),
                "sum": torch.zeros(20, device=device),
            },
            first_row=6,
            first_column=1,
        )
        for device in ("cpu", "cuda")
    )
    restore(run, PartsTarget([here]))
    restore(run, PartsTarget([there]))
    assert torch.equal(here.values, there.values.cpu())
    for name, state in here.row_states.items():
        assert torch.equal(state, there.row_states[name].cpu())
