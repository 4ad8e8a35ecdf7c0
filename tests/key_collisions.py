"""Keys that meet in a key map with seed 0, made by computing its hash backwards."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["keys_of_tag"]

_MODULUS = 1 << 64
#: Inverse factors.
_FIRST = pow(0x9E3779B97F4A7C15, -1, _MODULUS)
_SECOND = pow(0xD6E8FEB86659FD93, -1, _MODULUS)
_THIRD = pow(0xFF51AFD7ED558CCD, -1, _MODULUS)


def keys_of_tag(tag: int, low_halves: Iterable[int]) -> list[int]:
    """Return keys whose hashes have the high half `tag`, and these low halves."""
    keys = []
    for low in low_halves:
        key = tag << 32 | low
        for factor in (_THIRD, _SECOND, _FIRST):
            product = key * factor % _MODULUS
            key = product ^ product >> 32 if factor != _FIRST else product
        keys.append(key - _MODULUS if key >> 63 else key)
    return keys
