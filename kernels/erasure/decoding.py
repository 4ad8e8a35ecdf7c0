"""Which members of a stripe give the lost ones, and with which coefficients.

Members are numbered: 0 … data - 1 are the data members, `data` is P, `data + 1` is Q.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from recpoint.kernels.erasure.field import MOST_DATA, coefficient, inverse, multiply

__all__ = ["decoding_coefficients", "parity_coefficients"]

#: Member -> coefficient: the row that is the sum of coefficient · member. Never a coefficient of 0.
Combination = dict[int, int]


def parity_coefficients(data: int, member: int) -> Combination:
    """The data members' coefficients in P (member `data`) or Q (member `data + 1`).

    Raises:
        ValueError: data is not 1 … 255, or the member is neither P nor Q.
    """
    _require_data(data)
    if member not in (data, data + 1):
        raise ValueError(f"member: {member}, expected {data} (P) or {data + 1} (Q)")
    return {k: coefficient(k) if member > data else 1 for k in range(data)}


def decoding_coefficients(
    data: int, lost: Iterable[int], present: Iterable[int]
) -> dict[int, Combination]:
    """How each lost member is the sum of coefficient · member over members that are present.

    P is used before Q, so one lost data member is the plain sum of the others and P.

    Args:
        data: the number of data members, 1 … 255.
        lost: the members that are wanted.
        present: the members that can be read; not all of them need be used.

    Returns:
        For each lost member, the coefficients of present members, none of them 0.

    Raises:
        ValueError: data is not 1 … 255, a number is no member's, a member is both lost and present,
            or the present members do not determine the lost ones.
    """
    _require_data(data)
    lost_members, present_members = sorted(set(lost)), sorted(set(present))
    for name, members in (("lost", lost_members), ("present", present_members)):
        for member in members:
            if not 0 <= member < data + 2:
                raise ValueError(f"{name}: member {member}, expected 0 to {data + 1}")
    if overlap := set(lost_members) & set(present_members):
        raise ValueError(f"lost: members {sorted(overlap)}, expected none that are present")
    combinations: dict[int, Combination] = {k: {k: 1} for k in present_members if k < data}
    missing = [k for k in range(data) if k not in combinations]
    if missing and any(member in missing or member >= data for member in lost_members):
        combinations |= _solved(data, missing, present_members)
    return {
        member: combinations[member]
        if member < data
        else _sum((c, combinations[k]) for k, c in parity_coefficients(data, member).items())
        for member in lost_members
    }


def _solved(data: int, missing: list[int], present: Sequence[int]) -> dict[int, Combination]:
    """The missing data members, from one equation for each: P's, Q's, or both."""
    parities = [member for member in present if member >= data][: len(missing)]
    if len(parities) < len(missing):
        raise ValueError(
            f"present: members {list(present)} of {data} data members, P and Q; expected at least"
            f" {data} of them, or no wish for what cannot be decoded"
        )
    matrix, sides = [], []
    for parity in parities:
        row = parity_coefficients(data, parity)
        matrix.append([row[k] for k in missing])
        # What the missing members add to the parity: the parity less what the others add.
        sides.append({k: c for k, c in row.items() if k not in missing} | {parity: 1})
    inverted = _inverted(matrix)
    return {
        k: _sum(zip(factors, sides, strict=True))
        for k, factors in zip(missing, inverted, strict=True)
    }


def _inverted(matrix: list[list[int]]) -> list[list[int]]:
    """The inverse, by Gauss-Jordan elimination of the matrix beside the identity.

    No pivot is 0. The matrix has a row of ones, a row of distinct powers of g, or both. A pivot of
    the first is 1, one of the second is a power of g, and after the first has been subtracted the
    second has the sum of two distinct powers.
    """
    size = len(matrix)
    rows = [row + [int(i == j) for j in range(size)] for i, row in enumerate(matrix)]
    for i in range(size):
        scale = inverse(rows[i][i])
        rows[i] = [multiply(scale, value) for value in rows[i]]
        for j in range(size):
            factor = rows[j][i]
            if j != i and factor:
                rows[j] = [a ^ multiply(factor, b) for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]


def _sum(parts: Iterable[tuple[int, Combination]]) -> Combination:
    """The sum of factor · combination."""
    total: Combination = {}
    for factor, combination in parts:
        for member, value in combination.items():
            total[member] = total.get(member, 0) ^ multiply(factor, value)
    return {member: value for member, value in sorted(total.items()) if value}


def _require_data(data: int) -> None:
    if not 1 <= data <= MOST_DATA:
        raise ValueError(f"data: {data} members, expected 1 to {MOST_DATA}")
