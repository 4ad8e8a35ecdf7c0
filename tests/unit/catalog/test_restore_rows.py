"""Restoring a range of a table's rows: the same bits, and nothing of the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from recpoint.catalog.restore.restore import TableTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.errors import IncompatibleModel, NothingToRestore
from recpoint.format.manifest import Manifest
from recpoint.kernels import dirty_bitmap
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.consolidation import merge, trained
from tests.interposed_store import InterposedStore


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path)
    run.claim(None)
    return run


class Given:
    """Restores the first table into the target that it was given."""

    def __init__(self, target: TableTarget) -> None:
        self.target = target

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | None]:
        return [self.target, None]

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        pass


def of_rows(table: Table, wanted: range, *, marked: bool = False) -> TableTarget:
    rows = len(wanted)
    return TableTarget(
        values=torch.full((rows, table.dim), -7, dtype=table.values.dtype),
        row_states=tuple(torch.full((rows, *s.shape[1:]), -7, dtype=s.dtype) for s in table.states),
        changed=dirty_bitmap.new(rows) if marked else None,
        first_row=wanted.start,
    )


RANGES = [range(0, 40), range(0, 1), range(39, 40), range(7, 33), range(16, 32), range(12, 12)]


@pytest.mark.parametrize("wanted", RANGES, ids=str)
@pytest.mark.parametrize("bits", [None, 2, 8])
@pytest.mark.parametrize("consolidated", [False, True])
def test_a_range_has_the_bits_of_the_whole(
    run: Run, wanted: range, bits: int | None, consolidated: bool
) -> None:
    table, other = tables(bits=bits)
    made = trained(run, [table, other], [5, 6, 7, 8], bits=[bits])
    if consolidated:
        merge(run, made[-1], 2)
    whole, part = of_rows(table, range(40)), of_rows(table, wanted, marked=True)
    restore(run, Given(whole))
    restore(run, Given(part))
    rows = slice(wanted.start, wanted.stop)
    assert torch.equal(part.values, whole.values[rows])
    for found, expected in zip(part.row_states, whole.row_states, strict=True):
        assert found is not None and expected is not None
        assert torch.equal(found, expected[rows])
    assert part.changed is not None
    marked = dirty_bitmap.collect(part.changed, rows=len(wanted)) if wanted else torch.empty(0)
    full = of_rows(table, range(40), marked=True)
    restore(run, Given(full))
    assert full.changed is not None
    ids = dirty_bitmap.collect(full.changed, rows=40)
    inside = ids[(ids >= wanted.start) & (ids < wanted.stop)] - wanted.start
    assert marked.tolist() == inside.tolist()


@pytest.mark.parametrize(
    ("wanted", "chunks"),
    [(range(40), 3), (range(16), 1), (range(15, 17), 2), (range(32, 40), 1), (range(5, 5), 0)],
    ids=str,
)
def test_only_chunks_that_may_hold_the_rows_are_read(run: Run, wanted: range, chunks: int) -> None:
    made = tables()
    manifest = publish(run, build(run, made, step=5, generation=1))  # 16 rows a chunk
    store = InterposedStore(run.store)
    seen: list[tuple[int, int]] = []
    report = restore(
        Run.open(store),
        Given(of_rows(made[0], wanted)),
        on_progress=lambda done, of: seen.append((done, of)),
    )
    entries = {entry.key: entry for entry in manifest.chunks}
    read = [entries[key] for call, key in store.calls if call == "get" and key in entries]
    of_rows_read = [entry for entry in read if entry.content == "rows"]
    assert all(entry.table == 0 for entry in of_rows_read) and len(of_rows_read) == chunks
    assert report.chunks_read == len(read) == chunks + 1  # and the state
    assert report.bytes_read == sum(entry.bytes for entry in read)
    assert seen[-1] == (report.bytes_read, report.bytes_read)
    assert {of for _, of in seen} == {report.bytes_read}


@pytest.mark.parametrize("wanted", [range(30, 41), range(40, 41), range(-1, 3)], ids=str)
def test_rows_that_the_table_does_not_have_are_refused(run: Run, wanted: range) -> None:
    made = tables()
    publish(run, build(run, made, step=5, generation=1))
    target = of_rows(made[0], wanted)
    with pytest.raises(IncompatibleModel, match=f"rows {wanted.start} … {wanted.stop - 1} wanted"):
        restore(run, Given(target))
    assert bool((target.values == -7).all())


@pytest.mark.parametrize("links", [1, 2])
def test_rows_that_a_full_lacks_are_noticed(run: Run, links: int) -> None:
    # The count is right: row 3 is in two chunks, so that row 39 is in none.
    made = tables()
    ids = torch.cat([torch.arange(32), torch.tensor([3]), torch.arange(32, 39)])
    manifest = publish(run, build(run, made, step=5, generation=1, dirty=[ids, None]))
    if links == 2:
        some = [torch.tensor([0, 20]), torch.tensor([], dtype=torch.int64)]
        publish(run, build(run, made, step=6, generation=1, parent=manifest, dirty=some))
    with pytest.raises(NothingToRestore, match="rows of table 'items' from row 36 on"):
        restore(run, Given(of_rows(made[0], range(36, 40))))
