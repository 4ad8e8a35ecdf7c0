"""What a parity promises: any losses up to its number, from differences applied in any order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.kernels import erasure
from recpoint.kernels.erasure import reference


def _rows(generator: torch.Generator, n: int, row_bytes: int) -> Tensor:
    return torch.randint(0, 256, (n, row_bytes), dtype=torch.uint8, generator=generator)


@st.composite
def stripes(draw: st.DrawFn) -> tuple[list[Tensor], int, torch.Generator]:
    """Data members of some stripes, and 1 or 2, their parity."""
    data = draw(st.integers(1, 20))
    n, row_bytes = draw(st.integers(0, 9)), draw(st.integers(0, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (
        [_rows(generator, n, row_bytes) for _ in range(data)],
        draw(st.sampled_from([1, 2])),
        generator,
    )


@settings(deadline=None)
@given(stripes(), st.data())
def test_any_losses_up_to_the_parity_are_decoded(
    given: tuple[list[Tensor], int, torch.Generator], draws: st.DataObject
) -> None:
    data, parity, _ = given
    members = [*data, *erasure.encode(data, parity)]
    lost = draws.draw(st.sets(st.integers(0, len(members) - 1), max_size=parity))
    left = {k: rows for k, rows in enumerate(members) if k not in lost}
    # Which of the lost ones are wanted does not matter.
    wanted = draws.draw(st.sets(st.sampled_from(sorted(lost)))) if lost else set()
    found = erasure.decode(left, len(data), wanted)
    assert set(found) == wanted
    for member in wanted:
        assert torch.equal(found[member], members[member])


@settings(deadline=None)
@given(stripes(), st.data())
def test_differences_alone_keep_a_parity_equal_to_its_stripe(
    given: tuple[list[Tensor], int, torch.Generator], draws: st.DataObject
) -> None:
    """Rows change one after the other; their differences are applied later, in another order, in
    batches in which slots come again, some of them coalesced."""
    data, parity, generator = given
    n, row_bytes = data[0].shape
    parities = erasure.encode(data, parity)
    changes = draws.draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, max(0, n - 1))))
    )
    pending: list[tuple[int, int, Tensor]] = []
    for position, slot in changes if n else []:
        new = _rows(generator, 1, row_bytes)
        change = erasure.difference(data[position][slot : slot + 1].clone(), new)
        data[position][slot] = new[0]
        before = next((k for k, (p, s, _) in enumerate(pending) if (p, s) == (position, slot)), -1)
        if before >= 0 and draws.draw(st.booleans()):
            erasure.difference(pending[before][2], change, pending[before][2])
        else:
            pending.append((position, slot, change))
    pending = draws.draw(st.permutations(pending))
    cut = draws.draw(st.integers(0, len(pending)))
    for part in (pending[:cut], pending[cut:]):
        slots = torch.tensor([slot for _, slot, _ in part], dtype=torch.int64)
        positions = torch.tensor([position for position, _, _ in part], dtype=torch.int64)
        changed = [change for _, _, change in part]
        differences = torch.cat(changed) if changed else torch.empty_like(data[0][:0])
        erasure.apply(parities[0], slots, differences)
        if parity == 2:
            erasure.apply(parities[1], slots, differences, positions)
    assert all(map(torch.equal, parities, erasure.encode(data, parity)))


@settings(deadline=None)
@given(stripes(), st.data())
def test_every_implementation_has_the_bits_of_the_reference(
    given: tuple[list[Tensor], int, torch.Generator], draws: st.DataObject
) -> None:
    data, parity, generator = given
    n, row_bytes = data[0].shape
    expected = [torch.empty_like(data[0]) for _ in range(parity)]
    reference.encode(data, expected)
    assert all(map(torch.equal, erasure.encode(data, parity), expected))
    coefficients = draws.draw(st.lists(st.integers(0, 255), min_size=len(data), max_size=len(data)))
    reference.combine(data, coefficients, expected[0])
    assert torch.equal(erasure.combine(data, coefficients), expected[0])
    rows = draws.draw(st.integers(1, 9))
    table = _rows(generator, rows, row_bytes)
    slots = torch.randint(0, rows, (n,), generator=generator)
    positions = torch.randint(0, 255, (n,), generator=generator)
    for places in (None, positions):
        wanted = table.clone()
        reference.apply(wanted, slots, data[0], places)
        erasure.apply(table, slots, data[0], places)
        assert torch.equal(table, wanted)
