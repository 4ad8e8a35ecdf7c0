"""What merges of a chain take, for every number of links, against what manifests name."""

from __future__ import annotations

import pytest

from recpoint.catalog.consolidate import moves
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.merge_sizes import merge_sizes
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.persist import plan as persist_plan
from recpoint.catalog.restore import rows
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from tests.catalog_builder import tables
from tests.consolidation import chain_of, name_of, trained


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 14, the rows of the first table in 4 bits."""
    return trained(run, tables(rows=100, dim=8), [10, 11, 12, 13, 14], bits=[4])


def rows_of(manifest: Manifest) -> tuple[int, int]:
    """Rows stored, and their bytes."""
    entries = [entry for entry in manifest.chunks if entry.table is not None]
    return sum(entry.row_count or 0 for entry in entries), sum(entry.bytes for entry in entries)


def test_every_merge_is_the_plan_for_so_many_links(run: Run, links: list[Manifest]) -> None:
    merges = merge_sizes(links)
    assert [one.merged for one in merges] == [2, 3, 4, 5]
    state = links[-1].stored_bytes - rows_of(links[-1])[1]
    for one in merges:
        plan = plan_consolidation(run, name_of(links[-1]), links=one.merged)
        assert plan.merges == merges
        assert one.into_full == (plan.target.form == "full") == (one.merged == 5)
        assert (one.links_before, one.links_after) == (5, 6 - one.merged)
        assert (plan.links_before, plan.links_after) == (one.links_before, one.links_after)
        sources, rest = links[-one.merged :], links[: -one.merged]
        assert one.read_bytes == sum(rows_of(link)[1] for link in sources) + state
        assert one.read_bytes == sum(part.read_bytes for part in plan.parts) + plan.state_bytes
        assert one.merged_rows == sum(rows_of(link)[0] for link in sources)
        before = sum(rows_of(link)[1] for link in links) + state
        assert one.restore_bytes_before == before
        left = sum(rows_of(link)[1] for link in rest)
        assert one.restore_bytes_after == left + one.write_bytes
        left_rows = sum(rows_of(link)[0] for link in rest)
        assert one.restore_rows_after == left_rows + one.write_rows
    assert merges[-1].dead_rows == merges[-1].merged_rows - 150
    assert {one.dead_rows for one in merges[:-1]} == {None}


@pytest.mark.parametrize(
    ("chunk_bytes", "buffered_bytes"), [(persist_plan.CHUNK_BYTES, 1), (700, 1_000)]
)
def test_a_manifest_is_no_larger_than_it_may_be(
    run: Run,
    links: list[Manifest],
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
    buffered_bytes: int,
) -> None:
    # Few rows fill the buffer, so most chunks are written long before they are full.
    for module in (moves, persist_plan):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(moves, "BUFFERED_BYTES", buffered_bytes)
    for one in merge_sizes(links):
        done = consolidate(run, plan_consolidation(run, name_of(links[-1]), links=one.merged))
        (stored,) = run.store.list(done.key)
        assert stored.size_bytes <= one.most_manifest_bytes <= 4 * stored.size_bytes
        run.store.delete(done.key)


def test_a_merge_takes_no_more_than_it_says(run: Run, links: list[Manifest]) -> None:
    for one in merge_sizes(links)[:-1]:
        plan = plan_consolidation(run, name_of(links[-1]), links=one.merged)
        done = consolidate(run, plan)
        assert done.written_bytes <= one.write_bytes
        # Each is shorter than the one before, and is read from then on.
        read = sum(rows_of(link)[1] for link in chain_of(run, links[-1])) + plan.state_bytes
        assert read <= one.restore_bytes_after
        run.store.delete(done.key)  # the next one merges links as they were taken


def test_chunks_of_several_sections_count_once_for_each(
    run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = [one.read_bytes for one in merge_sizes(links)]
    monkeypatch.setattr(rows, "SECTION_ROWS", 10)
    for one, before in zip(merge_sizes(links), once, strict=True):
        plan = plan_consolidation(run, name_of(links[-1]), links=one.merged)
        assert one.read_bytes == sum(part.read_bytes for part in plan.parts) + plan.state_bytes
        assert one.read_bytes > before


def test_a_full_alone_has_nothing_to_merge(links: list[Manifest]) -> None:
    assert merge_sizes(links[:1]) == ()
