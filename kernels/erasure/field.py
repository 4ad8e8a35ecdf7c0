"""Single elements of GF(2^8), as plain integers: what coefficients are computed with.

An element is a polynomial over GF(2) of degree below 8; bit i is the coefficient of x^i. Products
are reduced by x^8 + x^4 + x^3 + x^2 + 1, of which x is a generator.
"""

from __future__ import annotations

import functools
from typing import Final

__all__ = ["MOST_DATA", "POLYNOMIAL", "coefficient", "inverse", "multiply"]

POLYNOMIAL: Final = 0x11D

#: The powers of g repeat after this many, and two data members must not share a coefficient.
MOST_DATA: Final = 255


def multiply(a: int, b: int) -> int:
    """a · b, each 0 … 255."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= POLYNOMIAL
    return product


@functools.cache
def inverse(a: int) -> int:
    """The element b with a · b = 1: a^254, because a^255 = 1.

    Raises:
        ZeroDivisionError: a is 0.
    """
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    result = 1
    for _ in range(254):
        result = multiply(result, a)
    return result


def coefficient(position: int) -> int:
    """g^position with g = 2: what Q multiplies the data member at `position` with."""
    power = 1
    for _ in range(position % MOST_DATA):
        power = multiply(power, 2)
    return power
