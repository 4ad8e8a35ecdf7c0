"""Parses JSON that may be damaged or hostile, after checking its bounds (format §4, §9)."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from recpoint.errors import MalformedObject

__all__ = ["MAX_VALUES", "brief", "measure", "parse_json"]

MAX_VALUES = 8_000_000
_MAX_DEPTH = 16
_MAX_FIELDS = 64

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_OTHER_BYTES = bytes(set(range(256)) - set(b'[]{},"'))
_SCAN_BYTES = 1 << 20


def parse_json(
    data: bytes,
    *,
    name: str,
    next_step: str,
    max_bytes: int,
    max_depth: int = _MAX_DEPTH,
    max_fields: int = _MAX_FIELDS,
) -> Any:
    """Parse JSON that anyone may have written.

    Only objects, lists, strings, integers, booleans and null come back. Three bounds are checked
    before the parser allocates anything: at most `max_bytes` bytes, nesting of at most `max_depth`,
    at most `MAX_VALUES` values. Also refused: an object with more than `max_fields` keys or with
    the same key twice, numbers that are not integers, text that is not UTF-8 or holds half a
    surrogate pair.

    Raises:
        MalformedObject: any of these; `name` is its subject.
    """

    def malformed(found: str, expected: str) -> MalformedObject:
        return MalformedObject(name, found=found, expected=expected, next_step=next_step)

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > max_fields:
            raise malformed(f"an object with {len(pairs)} fields", f"at most {max_fields}")
        record = dict(pairs)
        if len(record) != len(pairs):
            raise malformed(f"the key {_twice(pairs)} twice in one object", "each key once")
        return record

    def no_float(text: str) -> Any:
        raise malformed(f"the number {text[:40]}", "integers only")

    if len(data) > max_bytes:
        raise malformed(f"{len(data)} bytes", f"at most {max_bytes}")
    depth, values = measure(data, max_depth)
    if depth > max_depth:
        raise malformed(f"nesting deeper than {max_depth}", f"at most {max_depth} levels")
    if values > MAX_VALUES:
        raise malformed(f"{values} values", f"at most {MAX_VALUES}")
    try:
        parsed = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=fields,
            parse_float=no_float,
            parse_constant=no_float,
        )
        if _SURROGATE.search(data):
            # JSON's grammar allows half a surrogate pair, but no UTF-8 text can hold it again.
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise malformed(f"no JSON ({str(error)[:120]})", "UTF-8 JSON") from error
    return parsed


def brief(value: object) -> str:
    """Describe `value` for an error message, shortly and in constant time whatever its size."""
    match value:
        case str() | bytes():
            return repr(value) if len(value) <= 64 else f"{value[:61]!r} and {len(value) - 61} more"
        case bool() | None | float():
            return repr(value)
        case int():
            bits = value.bit_length()
            return str(value) if bits <= 128 else f"an integer of {bits} bits"
        case dict():
            return f"an object with {len(value)} fields"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return f"a {type(value).__name__}"


def _twice(pairs: list[tuple[str, Any]]) -> str:
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            return brief(key)
        keys.add(key)
    raise AssertionError("no key is there twice")


def measure(data: bytes, max_depth: int) -> tuple[int, int]:
    """Return (depth, upper bound of the number of values) of a JSON text, in linear time.

    If the text is no JSON, both are right up to the first mistake, where the parser stops.
    Stops early once the depth exceeds `max_depth`. Takes little more memory than the text; a
    regular expression or a loop over tokens would take much more.
    """
    if b"\\" in data:
        # Pairs of backslashes go first, from the left, so only a real escape of a quote is left.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(data.translate(None, _OTHER_BYTES), np.uint8)
    quotes, depth, deepest, values = 0, 0, 0, 1
    for start in range(0, len(marks), _SCAN_BYTES):
        part = marks[start : start + _SCAN_BYTES]
        quotes_so_far = quotes + np.cumsum(part == 0x22)
        outside = part[quotes_so_far % 2 == 0]
        quotes = int(quotes_so_far[-1])
        opening = (outside == 0x5B) | (outside == 0x7B)
        closing = (outside == 0x5D) | (outside == 0x7D)
        levels = np.cumsum(opening.astype(np.int8) - closing.astype(np.int8), dtype=np.int64)
        deepest = max(deepest, depth + int(levels.max(initial=0)))
        depth += int(levels[-1:].sum())
        values += int(np.count_nonzero(opening | (outside == 0x2C)))
        if deepest > max_depth:
            break
    return deepest, values
