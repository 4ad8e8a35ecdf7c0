"""Rows that were copied ahead are moved to the places of a plain cut: against a model in Python."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from recpoint.catalog.staging.slot import Placed, place_behind
from recpoint.format.dtypes import Dtype
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.snapshot import final_places
from recpoint.trainer_plugin.snapshot.final_places import Move, MovedTable, move_to_final_places
from tests.combinations import combinations

_ROWS_BYTES = (1, 2, 3, 7, 8, 12, 64, 100, 255, 300)


def content(*key: object, n: int) -> Tensor:
    """Bytes that follow from the key alone."""
    return torch.tensor(list(random.Random(repr(key)).randbytes(n)), dtype=torch.uint8)


@dataclass
class Table:
    """A table of a window: which rows have a place, and which rows are dirty at the cut."""

    number: int
    rows: int
    placed: set[int]
    dirty: set[int]
    row_bytes: list[int]  # of each array
    stays_whole: bool = False  # not copied ahead: its arrays are moved as they are
    first: dict[str, Placed] = field(default_factory=dict)
    last: dict[str, Placed] = field(default_factory=dict)

    @property
    def tail(self) -> list[int]:
        return sorted(self.dirty - self.placed)

    def row(self, array: int, row: int) -> Tensor:
        return content(self.number, array, row, n=self.row_bytes[array])

    def array(self, array: int, rows: list[int]) -> Tensor:
        empty = torch.empty(0, self.row_bytes[array], dtype=torch.uint8)
        return torch.stack([self.row(array, row) for row in rows]) if rows else empty

    def place(self, places: dict[str, Placed], rows: set[int], end: int) -> int:
        """Place the arrays as `place_tables` does; return the byte behind them."""
        if not rows:
            return end
        shapes: list[tuple[str, Dtype, tuple[int, ...]]] = []
        if len(rows) < self.rows:
            shapes.append((f"t{self.number}.ids", "I64", (len(rows),)))
        for array, size in enumerate(self.row_bytes):
            shapes.append((f"t{self.number}.{array}", "U8", (len(rows), size)))
        for name, dtype, shape in shapes:
            places[name] = place_behind(name, dtype, shape, end)
            end = places[name].end
        return end


def check(tables: list[Table], state_bytes: list[int]) -> None:
    """Build the slot as a window leaves it, move its rows, and compare each array."""
    first_end = last_end = 0
    for table in tables:
        first_end = table.place(table.first, table.placed, first_end)
        last_end = table.place(table.last, table.dirty, last_end)
    # State lies behind what is larger, as in `Window.finish`.
    end, behind = max(first_end, last_end), last_end
    state: list[tuple[Placed, Placed]] = []
    for number, size in enumerate(state_bytes):
        source = place_behind(f"tensor.{number}", "U8", (size,), end)
        target = place_behind(f"tensor.{number}", "U8", (size,), behind)
        end, behind = source.end, target.end
        state.append((source, target))
    data = torch.full((max(end, behind),), 0xAA, dtype=torch.uint8)
    moves = []
    for table in tables:
        bitmap = dirty_bitmap.new(table.rows)
        dirty_bitmap.mark(bitmap, torch.tensor(sorted(table.dirty)).long(), rows=table.rows)
        ids_name = f"t{table.number}.ids"
        for name, spot in table.first.items():
            rows = sorted(table.placed)
            whole = torch.tensor(rows) if name == ids_name else None
            array = table.array(int(name.split(".")[1]), rows) if whole is None else whole
            spot.view(data).copy_(array)
        moved_table = MovedTable(
            rows=table.rows,
            dirty=bitmap,
            ids=table.last.get(ids_name),
            provisional_ids=table.first.get(ids_name),
            tail_ids=torch.tensor(table.tail).long(),
        )
        for name, target in table.last.items():
            if name == ids_name:
                continue
            if table.stays_whole:
                moves.append(Move(source=table.first[name], target=target))
                continue
            source = table.first.get(name, target._replace(size_bytes=0))
            tail = table.array(int(name.split(".")[1]), table.tail)
            moves.append(Move(source=source, target=target, table=moved_table, tail=tail))
    for source, target in state:
        source.view(data).copy_(content(source.name, n=source.size_bytes))
        moves.append(Move(source=source, target=target))

    move_to_final_places(data, moves)

    for table in tables:
        rows = sorted(table.dirty)
        for name, spot in table.last.items():
            if name == f"t{table.number}.ids":
                assert spot.view(data).tolist() == rows, name
            else:
                expected = table.array(int(name.split(".")[1]), rows)
                assert torch.equal(spot.view(data), expected), name
    for source, target in state:
        assert torch.equal(target.view(data), content(source.name, n=source.size_bytes))


def some(draw: random.Random, rows: int) -> set[int]:
    """None, a few, most or all of the rows."""
    count = draw.choice([0, 1, rows // 10, rows // 2, rows - 1, rows])
    return set(draw.sample(range(rows), min(count, rows)))


def drawn(draw: random.Random, number: int) -> Table:
    rows = draw.choice([1, 2, 31, 33, 64, 200])
    sizes = [draw.choice(_ROWS_BYTES) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.15:
        every = set(range(rows))
        return Table(number, rows, every, every, sizes, stays_whole=True)
    placed, dirty = some(draw, rows), some(draw, rows)
    if draw.random() < 0.3:
        dirty |= placed  # no hole
    elif draw.random() < 0.3:
        dirty &= placed  # no tail
    return Table(number, rows, placed, dirty, sizes)


@pytest.mark.parametrize(("part", "buffer_bytes"), combinations(range(4), [1, 600, 4 << 20]))
def test_random_layouts(part: int, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small buffer has each array moved in many chunks."""
    monkeypatch.setattr(final_places, "_BUFFER_BYTES", buffer_bytes)
    for seed in range(40 * part, 40 * part + 40):
        draw = random.Random(seed)
        tables = [drawn(draw, number) for number in range(draw.randint(1, 4))]
        check(tables, [draw.choice([1, 64, 5_000]) for _ in range(draw.randint(0, 2))])


EVERY = set(range(100))


#: Rows that have a place, and dirty rows.
CASES: dict[str, tuple[set[int], set[int]]] = {
    "every row is in the tail": (set(), {3, 50, 99}),
    "every row of the table is in the tail": (set(), EVERY),
    "no row is left": (EVERY, set()),
    "all places but one are holes": (EVERY, {7}),
    "a full": (EVERY, EVERY),
    "more in the tail than holes": ({0, 1, 2}, {2, 97, 98, 99}),
    "more holes than in the tail": (EVERY - {99}, {98, 99}),
    "as many holes as in the tail": (EVERY - {99}, EVERY - {0}),
    "ids are not listed any more": (EVERY - {0}, EVERY),
    "it stays": ({5}, {5}),
}


@pytest.mark.parametrize(
    ("case", "row_bytes"), combinations(list(CASES), [[1], [300, 8], [64, 3, 100]])
)
def test_each_case_before_and_behind_others(
    case: str, row_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_places, "_BUFFER_BYTES", 650)
    neighbours = {
        "goes up": ({1}, {1, *range(40, 90)}),
        "goes down": (set(range(60)), {9}),
        "stays": ({4, 6}, {4, 6}),
        "is empty": (set(), set()),
    }
    for before in neighbours.values():
        for behind in neighbours.values():
            tables = [
                Table(number, 100, set(placed), set(dirty), sizes)
                for number, ((placed, dirty), sizes) in enumerate(
                    [(before, [12]), (CASES[case], row_bytes), (behind, [7, 64])]
                )
            ]
            check(tables, [333])


def test_tail_rows_of_other_dtypes_and_shapes() -> None:
    """A row state may be a scalar a row, and rows of the tail come as they are typed."""
    rows, placed, dirty = 40, [1, 5, 9], [0, 5, 39]
    values = torch.randn(rows, 2, 3, dtype=torch.float64)
    steps = torch.arange(rows, dtype=torch.int16)
    bitmap = dirty_bitmap.new(rows)
    dirty_bitmap.mark(bitmap, torch.tensor(dirty), rows=rows)
    arrays: list[tuple[str, Dtype, Tensor]] = [("values", "F64", values), ("steps", "I16", steps)]
    ids = place_behind("ids", "I64", (3,), 0)
    spots, end = {}, ids.end
    for name, dtype, array in arrays:
        spots[name] = place_behind(name, dtype, (3, *array.shape[1:]), end)
        end = spots[name].end
    data = torch.zeros(end, dtype=torch.uint8)
    ids.view(data).copy_(torch.tensor(placed))
    table = MovedTable(
        rows=rows, dirty=bitmap, ids=ids, provisional_ids=ids, tail_ids=torch.tensor([0, 39])
    )
    moves = []
    for name, _, array in arrays:
        spots[name].view(data).copy_(array[placed])
        spot = spots[name]
        moves.append(Move(source=spot, target=spot, table=table, tail=array[[0, 39]]))
    move_to_final_places(data, moves)
    assert ids.view(data).tolist() == dirty
    for name, _, array in arrays:
        assert torch.equal(spots[name].view(data), array[dirty])
