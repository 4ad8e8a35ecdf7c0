"""Combines the values of several parameters: by day each value once, by night all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["combinations"]


def combinations(*axes: Sequence[Any]) -> list[Any]:
    """Return each combination of a value of each axis, for `pytest.mark.parametrize`.

    `make test` takes the first value of each axis together, then the second ones, and so on. A
    shorter axis begins again, so each value is taken. The other combinations are the part
    `combinations` of `make nightly`.
    """
    longest = max(len(axis) for axis in axes)
    by_day = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    return [
        pytest.param(
            *(axis[number] for axis, number in zip(axes, numbers, strict=True)),
            marks=[] if numbers in by_day else [pytest.mark.nightly("combinations")],
        )
        for numbers in product(*(range(len(axis)) for axis in axes))
    ]
