"""Elements of the live page, as they go to a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("nicegui", reason="nicegui is not installed")

from nicegui import ui
from nicegui.client import Client
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from recpoint.dashboards import texts
from recpoint.dashboards.page_elements import STYLE, text

URL = "s3://bucket/teams/ads-ranker"


@pytest.fixture(autouse=True)
def _page() -> Iterator[None]:
    with Client(ui.page("/")):
        yield


def contents(element: TextElement) -> list[str]:
    """The words of the element and of its children, with `<wbr>` for each place of a break."""

    def of(child: Element) -> str:
        return child.text if isinstance(child, TextElement) else f"<{child.tag}>"

    return [element.text, *map(of, element.default_slot.children)]


def test_a_path_breaks_only_after_its_slashes() -> None:
    shown = text("h1", URL)
    assert contents(shown) == [
        "s3://",
        "<wbr>",
        "bucket/",
        "<wbr>",
        "teams/",
        "<wbr>",
        "ads-ranker",
    ]
    shown.fill("no path here")
    assert contents(shown) == ["no path here"]
    shown.fill("/a/b of 3 / 4 bytes/")
    assert contents(shown) == ["/", "<wbr>", "a/", "<wbr>", "b of 3 / 4 bytes/"]
    shown.fill("")
    assert contents(shown) == [""]


@pytest.mark.parametrize("words", [URL, "", "/", "a//b", "see <b>x</b>/y.\nAnd 1/2", "x/ y"])
def test_the_pieces_of_a_text_are_the_text(words: str) -> None:
    assert "".join(texts.path_pieces(words)) == words
    shown = text("span", words)
    assert "".join(part for part in contents(shown) if part != "<wbr>") == words


def test_no_column_is_narrower_than_a_piece_of_a_path() -> None:
    """`anywhere` lets a table make its columns as narrow as one letter."""
    (rule,) = re.findall(r"^td\.long \{[^}]*\}", STYLE, flags=re.MULTILINE)
    assert "overflow-wrap: break-word" in rule
