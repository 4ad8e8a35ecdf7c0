"""Parity of rows, on each instruction set: equal to the reference, to pyeclib and to galois."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from recpoint.kernels import erasure
from recpoint.kernels.erasure import reference
from recpoint.kernels.erasure.field import coefficient, inverse, multiply
from tests.unit.kernels.every import every

#: Rows and bytes of a row: nothing, less than a register, odd widths, several parts of a thread.
SHAPES = [(0, 8), (4, 0), (1, 1), (3, 5), (7, 131), (40, 512), (9, 2000)]


def rows(count: int, shape: tuple[int, int]) -> list[Tensor]:
    return [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(count)]


def encoded(data: Sequence[Tensor]) -> list[Tensor]:
    outs = [torch.empty_like(data[0]) for _ in range(2)]
    reference.encode(data, outs)
    return outs


class Reference(NamedTuple):
    """What the reference makes of some members; no test changes these tensors."""

    data: list[Tensor]
    parities: list[Tensor]
    coefficients: list[int]
    combined: Tensor


@functools.lru_cache(maxsize=8)  # it takes longer than all instruction sets and threads together
def referenced(count: int, shape: tuple[int, int]) -> Reference:
    data = rows(count, shape)
    coefficients = torch.randint(0, 256, (count,)).tolist()
    combined = torch.empty_like(data[0])
    reference.combine(data, coefficients, combined)
    return Reference(data, encoded(data), coefficients, combined)


@pytest.mark.parametrize("shape", SHAPES)
@every("count", [1, 2, 3, 10, 255])
def test_parities_and_sums_equal_the_reference(
    shape: tuple[int, int], count: int, threads: int
) -> None:
    data, parities, coefficients, combined = referenced(count, shape)
    for parity in (1, 2):
        found = erasure.encode(data, parity)
        assert len(found) == parity
        assert all(map(torch.equal, found, parities))
    assert torch.equal(erasure.combine(data, coefficients), combined)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_positions", [False, True])
def test_differences_of_the_same_slots_are_all_applied(
    shape: tuple[int, int], with_positions: bool, threads: int
) -> None:
    slots_there = 5 if shape[0] < 9 else 400
    n = 3 * shape[0]
    parity = torch.randint(0, 256, (slots_there, shape[1]), dtype=torch.uint8)
    differences = torch.randint(0, 256, (n, shape[1]), dtype=torch.uint8)
    slots = torch.randint(0, slots_there, (n,))
    slots[: n // 3] = slots_there - 1
    positions = torch.randint(0, 255, (n,)) if with_positions else None
    expected = parity.clone()
    reference.apply(expected, slots, differences, positions)
    erasure.apply(parity, slots, differences, positions)
    assert torch.equal(parity, expected)


@functools.cache
def large() -> tuple[list[Tensor], list[Tensor]]:
    """Three members, and P and Q, of so many bytes that results are streamed."""
    data = rows(3, (1, (9 << 20) // 2 + 77))
    return data, encoded(data)


@pytest.mark.parametrize("shift", [0, 1, 32])
def test_large_results_are_streamed_whatever_their_alignment(shift: int, threads: int) -> None:
    data, (p, q) = large()

    def moved(one: Tensor) -> Tensor:
        room = torch.empty(one.numel() + shift, dtype=torch.uint8)[shift:].view_as(one)
        return room.copy_(one)

    members = [moved(one) for one in data]
    outs = [moved(torch.zeros_like(p)) for _ in range(2)]
    erasure.encode(members, 2, outs)
    assert torch.equal(outs[0], p) and torch.equal(outs[1], q)
    erasure.combine(members, [1, 2, 4], outs[0])
    assert torch.equal(outs[0], q)


@pytest.mark.parametrize("shape", [(3, 5), (700, 64), (70_000, 64)])
def test_a_result_may_lie_on_a_member(shape: tuple[int, int]) -> None:
    data, (p, q), _, _ = referenced(3, shape)
    on_first = [one.clone() for one in data]
    assert torch.equal(erasure.combine(on_first, [1, 2, 4], on_first[0]), q)
    on_last = [one.clone() for one in data]
    erasure.encode(on_last, 2, [on_last[2], on_last[0]])
    assert torch.equal(on_last[2], p) and torch.equal(on_last[0], q)
    old, new = data[:2]
    assert torch.equal(erasure.difference(old, new.clone(), old.clone()), old ^ new)
    assert torch.equal(erasure.difference(old, new), old ^ new)


def test_nothing_beside_the_result_is_written(threads: int) -> None:
    for width in (1, 15, 33, 200, 777):
        room = torch.full((3 * width + 2,), 0xA5, dtype=torch.uint8)
        out = room[1:-1].view(3, width)
        data = rows(4, (3, width))
        erasure.encode(data, 1, [out])
        erasure.apply(out, torch.tensor([2, 0, 2]), data[0], torch.tensor([9, 0, 1]))
        assert room[0] == room[-1] == 0xA5


# --- the arithmetic ------------------------------------------------------------------------------


@functools.cache
def multiplication_table() -> list[list[int]]:
    return [[multiply(a, b) for b in range(256)] for a in range(256)]


def test_the_field_is_that_of_galois() -> None:
    galois = pytest.importorskip("galois")
    field = galois.GF(2**8, irreducible_poly=0x11D)
    assert field.primitive_element == 2
    elements = np.arange(256, dtype=np.uint8)
    products = field(elements)[:, None] * field(elements)[None, :]
    ours = multiplication_table()
    assert np.array_equal(np.asarray(products), ours)
    assert [inverse(a) for a in range(1, 256)] == (field(1) / field(elements[1:])).tolist()
    assert [coefficient(k) for k in range(255)] == (field(2) ** np.arange(255)).tolist()
    for factor in range(256):
        found = erasure.combine([torch.from_numpy(elements)[None]], [factor])
        assert found[0].tolist() == ours[factor]


def test_two_lost_members_are_the_solution_of_galois() -> None:
    galois = pytest.importorskip("galois")
    field = galois.GF(2**8, irreducible_poly=0x11D)
    count = 6
    data = rows(count, (4, 9))
    p, q = erasure.encode(data, 2)
    generator = field(np.ones((2, count), np.uint8))
    generator[1] = field(2) ** np.arange(count)
    stacked = field(np.stack([one.flatten().numpy() for one in data]))
    coded = generator @ stacked
    assert np.array_equal(coded, np.stack([p.flatten().numpy(), q.flatten().numpy()]))
    for lost in itertools.combinations(range(count), 2):
        rest = [k for k in range(count) if k not in lost]
        sides = coded - generator[:, rest] @ stacked[rest]
        solution = np.linalg.solve(generator[:, list(lost)], sides)
        left = {k: data[k] for k in rest} | {count: p, count + 1: q}
        found = erasure.decode(left, count, lost)
        for place, member in enumerate(lost):
            assert np.array_equal(found[member].flatten().numpy(), np.asarray(solution[place]))


def test_zero_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        inverse(0)


@pytest.mark.parametrize("count", [1, 2, 4, 10, 30])
@pytest.mark.parametrize("parity", [1, 2])
def test_parities_and_decoded_rows_are_those_of_isa_l(count: int, parity: int) -> None:
    """ISA-L, by way of pyeclib: its Vandermonde parities have the same coefficients."""
    interface = pytest.importorskip("pyeclib.ec_iface")
    if "isa_l_rs_vand" not in interface.VALID_EC_TYPES:
        pytest.skip("pyeclib was built without ISA-L")
    driver = interface.ECDriver(k=count, m=parity, ec_type="isa_l_rs_vand")
    shape = (16, 48)
    data = rows(count, shape)
    fragments = driver.encode(b"".join(one.numpy().tobytes() for one in data))
    header = len(fragments[0]) - data[0].nbytes
    members = [*data, *erasure.encode(data, parity)]
    assert [one.numpy().tobytes() for one in members] == [one[header:] for one in fragments]
    for lost in itertools.islice(itertools.combinations(range(len(members)), parity), 60):
        rebuilt = driver.reconstruct(
            [one for k, one in enumerate(fragments) if k not in lost], list(lost)
        )
        left = {k: one for k, one in enumerate(members) if k not in lost}
        found = erasure.decode(left, count, lost)
        for member, theirs in zip(lost, rebuilt, strict=True):
            assert found[member].numpy().tobytes() == theirs[header:]


@pytest.mark.parametrize("count", [2, 4, 7])
def test_losses_are_decoded_as_by_liberasurecode(count: int) -> None:
    """Its Vandermonde code has another second parity, but P and the decoded data are the same."""
    interface = pytest.importorskip("pyeclib.ec_iface")
    driver = interface.ECDriver(k=count, m=2, ec_type="liberasurecode_rs_vand")
    data = rows(count, (16, 48))
    content = b"".join(one.numpy().tobytes() for one in data)
    fragments = driver.encode(content)
    header = len(fragments[0]) - data[0].nbytes
    p, q = erasure.encode(data, 2)
    assert fragments[count][header:] == p.numpy().tobytes()
    for lost in itertools.combinations(range(count), 2):
        left = {k: one for k, one in enumerate([*data, p, q]) if k not in lost}
        found = erasure.decode(left, count, lost)
        whole = [found[k] if k in found else data[k] for k in range(count)]
        theirs = driver.decode([one for k, one in enumerate(fragments) if k not in lost])
        assert b"".join(one.numpy().tobytes() for one in whole) == theirs == content


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 254, 255])
def test_any_two_losses_of_a_long_stripe_are_decoded(count: int) -> None:
    data = rows(count, (2, 3))
    members = [*data, *erasure.encode(data, 2)]
    pairs = {(0, 1), (0, count - 1), (count - 1, count), (0, count + 1), (count, count + 1)}
    for lost in sorted({tuple(sorted(set(pair))) for pair in pairs}):
        left = {k: one for k, one in enumerate(members) if k not in lost}
        found = erasure.decode(left, count, lost)
        assert list(found) == list(lost)
        assert all(torch.equal(found[k], members[k]) for k in lost)


def test_the_cheapest_members_are_used() -> None:
    four = range(4)
    # One lost data member is an exclusive or: Q is not read.
    assert erasure.decoding_coefficients(4, [1], [0, 2, 3, 4, 5]) == {1: {0: 1, 2: 1, 3: 1, 4: 1}}
    assert erasure.decoding_coefficients(4, [4], four) == {4: dict.fromkeys(four, 1)}
    assert erasure.decoding_coefficients(4, [5], four) == {5: {0: 1, 1: 2, 2: 4, 3: 8}}
    # With another data member lost and not wanted, P is still found from what is there.
    assert set(erasure.decoding_coefficients(4, [4], [0, 1, 2, 5])[4]) == {0, 1, 2, 5}
    assert erasure.decoding_coefficients(4, [], [0]) == {}
    assert erasure.parity_coefficients(3, 3) == {0: 1, 1: 1, 2: 1}
    assert erasure.parity_coefficients(3, 4) == {0: 1, 1: 2, 2: 4}


@pytest.mark.parametrize(
    ("data", "lost", "present", "said"),
    [
        (4, [0, 1], [2, 3, 4], r"present: members \[2, 3, 4\] of 4 data members"),
        (4, [0, 1, 2], [3, 4, 5], "expected at least 4"),
        (4, [4], [0, 1, 2], "present: members"),
        (4, [6], [0, 1, 2, 3], "lost: member 6, expected 0 to 5"),
        (4, [0], [-1, 1, 2, 3], "present: member -1"),
        (4, [0, 1], [0, 2, 3, 4], r"lost: members \[0\], expected none that are present"),
        (0, [], [], "data: 0 members, expected 1 to 255"),
        (256, [], [], "data: 256 members"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    data: int, lost: list[int], present: list[int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        erasure.decoding_coefficients(data, lost, present)


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 5, 2**40, -(2**63)])
def test_an_index_out_of_range_is_named_and_nothing_is_applied(wrong: int) -> None:
    parity = torch.zeros(5, 3, dtype=torch.uint8)
    ones = torch.ones(2, 3, dtype=torch.uint8)
    with pytest.raises(IndexError, match=rf"slots: {wrong}, expected 0 <= value < 5"):
        erasure.apply(parity, torch.tensor([0, wrong]), ones)
    outside = 255 if wrong == 5 else wrong
    with pytest.raises(IndexError, match=rf"positions: {outside}, expected 0 <= value < 255"):
        erasure.apply(parity, torch.tensor([0, 1]), ones, torch.tensor([254, outside]))
    assert not parity.any()


def test_arguments_that_do_not_fit_are_refused() -> None:
    one, two = torch.zeros(4, 6, dtype=torch.uint8), torch.zeros(4, 6, dtype=torch.uint8)
    slots = torch.arange(4)

    def calls(wrong: Tensor) -> list[Callable[[], object]]:
        return [
            lambda: erasure.combine([one, wrong], [1, 1]),
            lambda: erasure.combine([one, two], [1, 1], wrong),
            lambda: erasure.encode([one, wrong], 2),
            lambda: erasure.encode([one, two], 1, [wrong]),
            lambda: erasure.difference(one, wrong),
        ]

    for wrong, what in [
        (two[:3], "shape"),
        (two[:, :5].contiguous(), "shape"),
        (two.int(), "dtype"),
        (two.flatten(), "expected 2 dimensions"),
        (torch.zeros(6, 4, dtype=torch.uint8).t(), "not contiguous"),
    ]:
        for refused in calls(wrong):
            with pytest.raises(ValueError, match=what):
                refused()
    given: list[tuple[Callable[[], object], str]] = [
        (lambda: erasure.combine([one], [1, 2]), "coefficients: 2 for 1 members"),
        (lambda: erasure.combine([one], [256]), "coefficients: 256, expected 0 to 255"),
        (lambda: erasure.combine([], []), "members: none"),
        (lambda: erasure.combine([one] * 258, [1] * 258), "members: 258, expected 1 to 257"),
        (lambda: erasure.encode([], 1), "data: no members"),
        (lambda: erasure.encode([one] * 256, 2), "members: 256, expected 1 to 255"),
        (lambda: erasure.encode([one], 3), "parity: 3, expected 1 or 2"),
        (lambda: erasure.encode([one], 2, [two]), "outs: 1, expected 2"),
        (lambda: erasure.apply(one, slots[:3], two), "slots: 3 for 4 differences"),
        (lambda: erasure.apply(one, slots.int(), two), "slots: dtype"),
        (lambda: erasure.apply(one, slots, two, slots[:2]), "positions: 2 for 4 differences"),
        (lambda: erasure.apply(one, slots, two, slots.int()), "positions: dtype"),
        (lambda: erasure.apply(one, slots, two[:, :4].contiguous()), "differences: 4 bytes a row"),
        (lambda: erasure.apply(one, slots, two.bool()), "differences: dtype"),
        (lambda: erasure.combine([one, two.to("meta")], [1, 1]), "on meta, expected"),
        (lambda: erasure.combine([one.to("meta")], [1]), "members: device meta, expected cpu"),
    ]
    for call, what in given:
        with pytest.raises(ValueError, match=what):
            call()
