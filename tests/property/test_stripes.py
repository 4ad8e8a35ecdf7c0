"""Stripes place rows and parity rows, for random tables, numbers of servers and hosts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.embeddings.parity.stripes import Parity, Stripes, TablesStripes, stripes_of
from recpoint.errors import SettingsError


@st.composite
def all_stripes(draw: st.DrawFn) -> Stripes:
    data, parity = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    servers = draw(st.integers(data + parity, data + parity + 3))
    hosts = draw(st.lists(st.sampled_from("abcd"), min_size=servers, max_size=servers))
    rows = draw(st.integers(1, 300))
    form = Parity(data=data, parity=parity)
    return Stripes(rows, form, hosts, shift=draw(st.integers(0, 1_000)))


@settings(deadline=None)  # a cycle is dealt out when it is first needed
@given(all_stripes(), st.data())
def test_each_row_has_one_slot(stripes: Stripes, data: st.DataObject) -> None:
    ids = torch.tensor(
        data.draw(st.sets(st.integers(0, stripes.rows - 1)).map(sorted)), dtype=torch.int64
    )
    found: list[int] = []
    for server, (positions, slots) in enumerate(stripes.split(ids)):
        assert torch.equal(stripes.ids(server, slots), ids[positions])
        assert (slots >= 0).all() and (slots < stripes.slots(server)).all()
        assert (slots[1:] > slots[:-1]).all() and (positions[1:] > positions[:-1]).all()
        found += positions.tolist()
    assert sorted(found) == list(range(len(ids)))


@settings(deadline=None)  # a cycle is dealt out when it is first needed
@given(all_stripes(), st.data())
def test_a_range_of_rows_is_a_range_of_slots(stripes: Stripes, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, stripes.rows))
    rows = range(first, data.draw(st.integers(first, stripes.rows)))
    for server, (_, slots) in enumerate(stripes.split(torch.tensor(rows, dtype=torch.int64))):
        within = stripes.slots_of(server, rows)
        assert slots.tolist() == list(within)
        assert within.stop <= stripes.slots(server)


@st.composite
def several_stripes(draw: st.DrawFn) -> list[Stripes]:
    """Those of several tables on the same servers."""
    first = draw(all_stripes())
    form = Parity(data=first.data, parity=first.parity)
    hosts = draw(st.lists(st.sampled_from("ab"), min_size=first.servers, max_size=first.servers))
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    return [Stripes(rows, form, hosts, shift=draw(st.integers(0, 1_000))) for rows in sizes]


@settings(deadline=None)  # a cycle is dealt out when it is first needed
@given(several_stripes(), st.data())
def test_receivers_of_rows_are_those_of_their_parity_rows(
    tables: list[Stripes], data: st.DataObject
) -> None:
    server = data.draw(st.integers(0, tables[0].servers - 1))
    chosen = [
        data.draw(st.sets(st.integers(0, max(0, len(one.slots_of(server, range(one.rows))) - 1))))
        if one.slots_of(server, range(one.rows))
        else set()
        for one in tables
    ]
    listed = [(table, slot) for table, slots in enumerate(chosen) for slot in sorted(slots)]
    of, slots = (
        torch.tensor(column, dtype=torch.int64)
        for column in ([t for t, _ in listed], [s for _, s in listed])
    )
    form = TablesStripes(tables)
    stripes, positions = form.members_at(of, server, slots)
    receivers = form.receivers(of, stripes)
    every = torch.arange(tables[0].data)
    where = form.slots_in(of.view(-1, 1), stripes.view(-1, 1), every)
    has_row = form.has_row(of.view(-1, 1), stripes.view(-1, 1), every)
    expected: dict[tuple[int, int, int], int] = {}
    for row, (table, slot) in enumerate(listed):
        stripe, position = tables[table].members_at(server, torch.tensor([slot]))
        assert (int(stripes[row]), int(positions[row])) == (int(stripe), int(position))
        alone = tables[table].slots_in(stripe, every)
        assert all(torch.equal(one[row], other) for one, other in zip(where, alone, strict=True))
        expected_rows = stripe * tables[table].data + every < tables[table].rows
        assert torch.equal(has_row[row], expected_rows)
        for number in range(tables[0].parity):
            at, place = tables[table].parity_in(stripe, number)
            back = form.parity_at(of[row : row + 1], int(at), place)
            assert [int(one) for one in back] == [int(stripe), number]
            expected[int(at), table, int(place)] = row + number * len(listed)
    found: dict[tuple[int, int, int], int] = {}
    for receiver in receivers:
        assert len(receiver.counts) == len(tables)
        parts = zip(
            receiver.slots.split(list(receiver.counts)),
            receiver.rows.split(list(receiver.counts)),
            strict=True,
        )
        for table, (places, rows) in enumerate(parts):
            assert (places[1:] > places[:-1]).all()
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                found[receiver.server, table, place] = row
    assert found == expected


@settings(deadline=None)  # a cycle is dealt out when it is first needed
@given(all_stripes())
def test_members_of_a_stripe_are_on_different_servers(stripes: Stripes) -> None:
    every = torch.arange(stripes.count)
    servers = [
        stripes.slots_in(every, torch.full_like(every, one))[0] for one in range(stripes.data)
    ]
    for number in range(stripes.parity):
        at, slots = stripes.parity_in(every, number)
        servers.append(at)
        for server in range(stripes.servers):
            here = (at == server).nonzero().view(-1)
            assert (slots[here] < stripes.parity_slots(server)).all()
            of = torch.zeros_like(here)
            back, which = TablesStripes([stripes]).parity_at(of, server, slots[here])
            assert torch.equal(back, here) and (which == number).all()
    ordered = torch.stack(servers).sort(0).values
    assert (ordered[1:] > ordered[:-1]).all()
    for position in range(stripes.data):
        for stripe, server in enumerate(servers[position].tolist()):
            slot = stripes.slots_in(every[stripe], torch.tensor(position))[1].view(1)
            assert [int(one) for one in stripes.members_at(server, slot)] == [stripe, position]


@settings(deadline=None)  # a cycle is dealt out when it is first needed
@given(all_stripes())
def test_servers_differ_by_one_parity_row_at_most(stripes: Stripes) -> None:
    counts = [stripes.parity_slots(server) for server in range(stripes.servers)]
    assert sum(counts) == stripes.count * stripes.parity
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    "data,parity,hosts", [(4, 1, "abcdeabcde"), (2, 1, "aabbcc"), (2, 2, "aabbccdd")]
)
def test_members_of_a_stripe_are_on_different_hosts(data: int, parity: int, hosts: str) -> None:
    stripes = stripes_of("users", rows=1_000, parity=Parity(data=data, parity=parity), hosts=hosts)
    every = torch.arange(stripes.count)
    servers = [stripes.slots_in(every, torch.full_like(every, one))[0] for one in range(data)]
    servers += [stripes.parity_in(every, number)[0] for number in range(parity)]
    for members in torch.stack(servers).t().tolist():
        assert len({hosts[one] for one in members}) == data + parity


@pytest.mark.parametrize("servers", [3, 5, 8])
@pytest.mark.parametrize("data,parity", [(2, 1), (1, 2)])
def test_servers_have_about_the_same_rows(servers: int, data: int, parity: int) -> None:
    form = Parity(data=data, parity=parity)
    stripes = stripes_of("users", rows=10_000, parity=form, hosts=[*map(str, range(servers))])
    counts = [len(stripes.slots_of(server, range(10_000))) for server in range(servers)]
    assert sum(counts) == 10_000
    assert max(counts) - min(counts) <= 20


@pytest.mark.parametrize("data,parity", [(0, 1), (4, 0), (4, 3), (2.0, 1), (65, 1)])
def test_parity_that_cannot_work_is_refused(data: int, parity: int) -> None:
    with pytest.raises(SettingsError, match="expected 1 to"):
        Parity(data=data, parity=parity)


def test_too_few_servers_are_refused() -> None:
    with pytest.raises(SettingsError, match="4 embedding servers.*at least 5"):
        Parity(data=4).require_servers(4)
