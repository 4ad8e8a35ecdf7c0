"""Random chains: what their merges take at most, and that the one chosen helps for a while."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from recpoint.catalog.consolidate.choice import cheapest, weigh
from recpoint.catalog.consolidate.merge_sizes import MergeSizes
from recpoint.catalog.consolidate.plan import ConsolidationTriggers
from recpoint.catalog.restore.rows import Live, LiveRows
from recpoint.format.manifest import ChunkEntry
from recpoint.format.naming import row_chunk_key

ROWS = 60

#: Of each link, of each of two tables: ids, cut into chunks of so many.
links = st.lists(
    st.tuples(
        st.frozensets(st.integers(0, ROWS - 1), min_size=1, max_size=12),
        st.frozensets(st.integers(0, ROWS - 1), max_size=4),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=12,
)
triggers = st.builds(
    ConsolidationTriggers,
    links=st.integers(2, 12),
    restore_ratio=st.floats(1, 3),
    dead_share=st.floats(0, 1),
)
Link = tuple[frozenset[int], frozenset[int], int]


def chunks_of(link: Link) -> list[ChunkEntry]:
    """Rows of table t take t + 1 bytes each."""
    entries = []
    for table, ids in enumerate(link[:2]):
        ordered = sorted(ids)
        for first in range(0, len(ordered), link[2]):
            part = ordered[first : first + link[2]]
            entries.append(
                ChunkEntry(
                    key=row_chunk_key(1, 1, "a" * 32, rank=0, table=table, number=first),
                    bytes=len(part) * (table + 1),
                    crc32c=0,
                    content="rows",
                    rank=0,
                    table=table,
                    row_count=len(part),
                    first_row=part[0],
                    last_row=part[-1],
                    bits=32,
                    scheme="exact",
                )
            )
    return entries


def bounds_of(chain: list[Link]) -> list[Live]:
    """Of the newest 1, 2, … links, one added after the other."""
    live = LiveRows()
    found = []
    for link in reversed(chain):
        live.add(chunks_of(link))
        found.append(live.most)
    return found


def merges_of(chain: list[Link]) -> list[MergeSizes]:
    sizes = [Live(len(a) + len(b), len(a) + 2 * len(b)) for a, b, _ in chain]
    full = Live(2 * ROWS, 3 * ROWS)
    before = full.size_bytes + sum(size.size_bytes for size in sizes)
    rows = full.rows + sum(size.rows for size in sizes)
    found = []
    for merged in range(2, len(chain) + 2):
        whole = merged > len(chain)
        written = full if whole else bounds_of(chain)[merged - 1]
        read = before if whole else sum(size.size_bytes for size in sizes[-merged:])
        read_rows = rows if whole else sum(size.rows for size in sizes[-merged:])
        found.append(
            MergeSizes(
                merged=merged,
                links_before=len(chain) + 1,
                links_after=len(chain) + 2 - merged,
                read_bytes=read,
                write_bytes=written.size_bytes,
                write_rows=written.rows,
                merged_rows=read_rows,
                restore_bytes_before=before,
                restore_bytes_after=before - read + written.size_bytes,
                restore_rows_after=rows - read_rows + written.rows,
                most_manifest_bytes=0,
            )
        )
    return found


@given(links)
def test_the_bound_holds_and_one_by_one_is_no_looser(chain: list[Link]) -> None:
    for count, bound in enumerate(bounds_of(chain), 1):
        newest = chain[-count:]
        at_once = LiveRows()
        at_once.add([chunk for link in newest for chunk in chunks_of(link)])
        assert bound.rows <= at_once.most.rows and bound.size_bytes <= at_once.most.size_bytes
        held = [[one for one, _, _ in newest], [other for _, other, _ in newest]]
        there = [len(frozenset[int]().union(*ids)) for ids in held]
        stored = [sum(map(len, ids)) for ids in held]
        assert sum(there) <= bound.rows <= sum(stored)
        assert there[0] + 2 * there[1] <= bound.size_bytes <= stored[0] + 2 * stored[1]


@given(links, triggers)
def test_the_choice_is_the_cheapest_that_helps(
    chain: list[Link], when: ConsolidationTriggers
) -> None:
    merges = merges_of(chain)
    reached = when.reached(merges[-1])
    weighed = weigh(merges, when)
    assert [one.sizes for one in weighed] == merges
    best = cheapest(weighed)
    assert (best is None) == (not reached)
    if best is None:
        return
    costs = [one.cost_bytes for one in weighed if one.cost_bytes is not None]
    assert best.cost_bytes == min(costs)
    assert all((one.cost_bytes is None) == bool(one.why_not) for one in weighed)
    # A full is always among them, so that nothing costs more than it.
    moved = best.sizes.read_bytes + best.sizes.write_bytes
    assert moved <= merges[-1].read_bytes + merges[-1].write_bytes
    if best.sizes.into_full:
        return
    # Half of the way to what was reached is free again.
    if "links" in reached:
        assert best.sizes.links_after - 1 <= (when.links - 1) / 2
    else:
        assert best.sizes.links_after < when.links
    if reached.keys() - {"links"}:
        full = merges[-1]
        left = best.sizes.restore_bytes_after / full.restore_bytes_after
        dead = best.sizes.restore_rows_after - full.write_rows
        assert left - 1 <= (when.restore_ratio - 1) / 2
        assert dead <= best.sizes.restore_rows_after * when.dead_share / 2


@given(links)
def test_each_link_more_is_read_and_saves_no_less(chain: list[Link]) -> None:
    for one, more in pairwise(merges_of(chain)):
        assert more.read_bytes > one.read_bytes
        assert more.restore_bytes_after <= one.restore_bytes_after
