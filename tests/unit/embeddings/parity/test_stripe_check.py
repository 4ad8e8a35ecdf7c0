"""Stripes are compared with their parity: damage is found and named, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recpoint.embeddings.home.contract import Checked, TableRows
from recpoint.embeddings.parity.peers import OutOfStep, TableSlots
from recpoint.embeddings.parity.stripe_check import StripeVerdict, condensed, verdicts
from recpoint.embeddings.parity.stripes import Parity, Stripes, stripes_of
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.errors import HomeError
from recpoint.kernels import erasure
from recpoint.testing.homes import ids_of, records_of
from tests.near_members import near_members
from tests.protected_servers import flip_bit, protected

T = TypeVar("T")

RECORD_BYTES = 20
ROWS = 301


@given(
    row_bytes=st.integers(1, 40),
    data=st.integers(1, 6),
    parity=st.integers(1, 2),
    seed=st.integers(0, 2**32),
    choice=st.randoms(use_true_random=False),
)
def test_any_changed_bit_is_found_and_named(
    row_bytes: int, data: int, parity: int, seed: int, choice: Random
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(0, 256, (5, row_bytes), dtype=torch.uint8, generator=generator)
        for _ in range(data)
    ]
    members = [*rows, *erasure.encode(rows, parity)]
    assert verdicts(list(map(condensed, members)), data).tolist() == [StripeVerdict.FITS] * 5
    member, stripe = choice.randrange(len(members)), choice.randrange(5)
    members[member] = members[member].clone()
    members[member][stripe, choice.randrange(row_bytes)] ^= 1 << choice.randrange(8)
    found = verdicts(list(map(condensed, members)), data)
    expected = torch.full((5,), int(StripeVerdict.FITS), dtype=torch.uint8)
    expected[stripe] = StripeVerdict.DIFFERS if parity == 1 else StripeVerdict.DAMAGED + member
    assert torch.equal(found, expected)


@contextmanager
def written(count: int, form: Parity) -> Iterator[tuple[list[EmbeddingServer], ServedHome]]:
    with protected(count, form) as (servers, home):
        home.add_table("items", rows=ROWS, record_bytes=RECORD_BYTES)
        rows = list(range(0, ROWS, 3))
        home.write_back("items", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        yield servers, home


def all_rows() -> Tensor:
    return ids_of(range(ROWS))


@pytest.mark.parametrize("count, form", [(5, Parity(data=4)), (6, Parity(data=3, parity=2))])
def test_a_flipped_bit_of_a_stored_row_is_named_by_its_stripe(count: int, form: Parity) -> None:
    row, stripes = 33, -(-ROWS // form.data)
    stripe = row // form.data
    with written(count, form) as (servers, home), home.freeze("items", range(ROWS)) as frozen:
        assert frozen.check(all_rows()) == Checked(stripes=stripes)
        assert frozen.check(ids_of([0, 1, row])) == Checked(stripes=2)
        server = flip_bit(servers, home, "items", row, byte=RECORD_BYTES - 1)
        placement = home._tables.get("items").placement
        assert isinstance(placement, Stripes)
        where = ", ".join(str(one + 1) for one in placement.members_of(stripe))
        what = f"rows {stripe * form.data} to {(stripe + 1) * form.data - 1} that do not fit"
        if form.parity == 2:
            what = f"row {row} on embedding server {server + 1} that does not fit the others"
        with pytest.raises(HomeError, match=what) as raised:
            frozen.check(all_rows())
        assert raised.value.subject == (
            f"stripe {stripe} of table 'items', on embedding servers {where}"
        )
        others = [one for one in range(ROWS) if one // form.data != stripe]
        assert frozen.check(ids_of(others)) == Checked(stripes=stripes - 1)
        # A write does not mend it: its difference comes from the damaged row.
        home.write_back("items", ids_of([row]), records_of([row], RECORD_BYTES), batch=2)
        with pytest.raises(HomeError, match=what):
            frozen.check(ids_of([row]))


def test_stripes_of_a_lost_server_are_unknown_and_no_error() -> None:
    with written(5, Parity(data=2)) as (servers, home):
        with home.freeze("items", range(ROWS)) as frozen:
            servers[1].end()
            found = frozen.check(all_rows())
        assert found.stripes and found.unknown
        assert found.stripes + found.unknown == -(-ROWS // 2)


def test_without_parity_nothing_is_compared() -> None:
    with ServedHome([EmbeddingServer()]) as home:
        home.add_table("items", rows=ROWS, record_bytes=RECORD_BYTES)
        with home.freeze("items", range(ROWS)) as frozen:
            assert frozen.check(all_rows()) == Checked()


def test_a_server_that_others_take_for_lost_compares_and_decodes_nothing() -> None:
    """It answers, and others write without its parity: its parity rows are no proof any more."""
    members = near_members({"items": RECORD_BYTES}, rows=30)
    stripes = stripes_of("items", rows=30, parity=Parity(data=2), hosts="abc")
    holder = 2
    slots = torch.arange(stripes.parity_slots(holder))
    assert set(members[holder].check("items", slots).tolist()) == {StripeVerdict.FITS}
    for number in (0, 1):
        members[number].other_servers.lose(holder, holder + 1)
        rows = torch.arange(len(stripes.slots_of(number, range(30))))
        records = torch.full((len(rows), RECORD_BYTES), number + 7, dtype=torch.uint8)
        members[number].write([TableRows("items", rows, records)])
        members[number].other_servers.flush()
    with pytest.raises(OutOfStep, match="does not send to server 3"):
        members[holder].check("items", slots)
    lost = torch.arange(len(stripes.slots_of(0, range(30))))
    servers, _ = stripes.parity_in(stripes.members_at(0, lost)[0], 0)
    with pytest.raises(OutOfStep, match="does not send to server 3"):
        members[holder].recovery.decoded([TableSlots("items", lost[servers == holder])], 0)
