"""A placement gives each row a slot of its own, for random tables and numbers of servers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from recpoint.embeddings.server.placement import Placement, placement_of


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    servers = draw(st.integers(1, 9))
    return Placement(draw(st.integers(1, 200)), servers, draw(st.integers(0, servers - 1)))


@given(placements(), st.data())
def test_each_row_has_one_slot(placement: Placement, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, placement.rows - 1)).map(sorted))
    ids = torch.tensor(chosen, dtype=torch.int64)
    found: list[int] = []
    split = placement.split(ids)
    assert len(split) == placement.servers
    for server, (positions, slots) in enumerate(split):
        assert torch.equal(placement.ids(server, slots), ids[positions])
        assert (slots >= 0).all() and (slots < placement.slots(server)).all()
        assert (slots[1:] > slots[:-1]).all() and (positions[1:] > positions[:-1]).all()
        found += positions.tolist()
    assert sorted(found) == list(range(len(chosen)))


@given(placements(), st.data())
def test_a_range_of_rows_is_a_range_of_slots(placement: Placement, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, placement.rows))
    rows = range(first, data.draw(st.integers(first, placement.rows)))
    for server, (_, slots) in enumerate(placement.split(torch.tensor(rows, dtype=torch.int64))):
        within = placement.slots_of(server, rows)
        assert slots.tolist() == list(within)
        assert within.stop <= placement.slots(server)


@given(st.text(min_size=1), st.integers(1, 100), st.integers(1, 9))
def test_no_server_has_more_than_its_part(table: str, rows: int, servers: int) -> None:
    placement = placement_of(table, rows=rows, servers=servers)
    split = placement.split(torch.arange(rows))
    assert all(rows // servers <= len(slots) <= -(-rows // servers) for _, slots in split)
    assert all(placement.slots(server) <= -(-rows // servers) + 1 for server in range(servers))


def test_small_tables_are_on_different_servers() -> None:
    placements = [placement_of(f"table {number}", rows=1, servers=4) for number in range(100)]
    counts = [sum(one.offset == server for one in placements) for server in range(4)]
    assert min(counts) > 10
    # For ever: each process of a training places rows alike, whatever its hash seed.
    assert placement_of("users", rows=1, servers=1_000).offset == 344_172_009 % 1_000
