"""How values become text for a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from recpoint.dashboards.terminal import (
    error_text,
    fields_table,
    shown,
    validation_table,
)
from recpoint.errors import SettingsError
from recpoint.format.validation import ValidationFinding
from recpoint.units import bytes_text, time_text


def printed(view: object) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    console.print(view)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (34_300_000, "34.3 MB"),
        (10**18, "1 EB"),
        (2**63, "9.22 EB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@given(st.integers(0, 2**63))
def test_bytes_are_never_far_off(count: int) -> None:
    number, unit = bytes_text(count).split()
    value = float(number) * 1000 ** ("B", "kB", "MB", "GB", "TB", "PB", "EB").index(unit)
    assert abs(value - count) <= 0.005 * count


def test_times() -> None:
    assert time_text(1_750_000_000_000) == "2025-06-15 15:06:40"
    assert time_text(2**53 - 1) == "9007199254740991 ms"  # no calendar goes that far


@given(st.text(st.characters(codec=None), max_size=400))
def test_shown_is_literal_and_printable(text: str) -> None:
    plain = shown(text).plain
    assert plain.isprintable()
    if text.isprintable() and len(text) <= 300:
        assert plain == text


def test_markup_is_text() -> None:
    hostile = "[red]x[/red][link=file:///]y[/link]"
    assert hostile in printed(fields_table([("name", hostile)]))
    assert hostile in printed(shown(hostile))


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 10_000).plain) == 300
    assert shown("x" * 10_000).plain.endswith("…")


def test_an_error_tells_all_four_things() -> None:
    error = SettingsError("bits", found="5\x1b[1m", expected="8", next_step="choose 8")
    text = printed(error_text(error))
    for part in ("SettingsError", "bits", r"5\x1b[1m", "8", "choose 8"):
        assert part in text
    assert "\x1b" not in text


def test_every_column_of_findings_has_a_heading() -> None:
    finding = ValidationFinding(
        subject="items", row=7, what="values", found="1", expected="2", bound="0"
    )
    heading = printed(validation_table([finding], [])).splitlines()[1]
    assert heading.split() == ["kind", "object", "row", "what", "found", "expected", "within"]
