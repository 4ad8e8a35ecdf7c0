"""Pieces of a page that are filled again and again: only what has changed goes to the browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

__all__ = ["STYLE", "Alerts", "Chart", "Fields", "Table", "heading", "text"]

#: Contrast of every text with its ground is at least 7 to 1; states differ in words, not colour.
STYLE = """
<style>
  body { font-family: system-ui, sans-serif; color: #1a1a1a; background: #fff; }
  .page { padding: 1rem 1.5rem; width: 100%; box-sizing: border-box; }
  .nicegui-content { padding: 0; }
  h1 { font-size: 1.5rem; line-height: 2rem; font-weight: 600; }
  h2 { font-size: 1.15rem; line-height: 1.6rem; font-weight: 600; margin: 1.2rem 0 .4rem; }
  table { border-collapse: collapse; width: 100%; font-size: .875rem; }
  caption { text-align: left; color: #404040; padding-bottom: .3rem; }
  th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #c4c4c4;
           vertical-align: top; white-space: nowrap; font-variant-numeric: tabular-nums; }
  th { font-weight: 600; }
  thead th { border-bottom: 2px solid #595959; white-space: normal; }
  td.long { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
  td.long a { display: inline-block; min-width: 12rem; }
  .scroll { overflow-x: auto; width: 100%; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: .4rem 0; }
  dt { color: #404040; } dd { margin: 0; font-variant-numeric: tabular-nums; }
  .state { font-weight: 600; }
  .bad { color: #fff; background: #8f1d0a; padding: .1rem .4rem; border-radius: .2rem; }
  .good { color: #0b4f1e; }
  .alerts p { border-left: .4rem solid #8f1d0a; background: #fdeeeb; color: #4d0f05;
              padding: .4rem .8rem; margin: .3rem 0; overflow-wrap: anywhere; }
  figure { margin: .4rem 0; } figcaption { color: #404040; font-size: .875rem; }
  .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr));
            gap: 1rem; width: 100%; }
  a { color: #0b3d91; text-decoration: underline; }
  a:focus-visible { outline: 3px solid #0b3d91; outline-offset: 2px; }
</style>
"""


def text(tag: str, words: str = "", classes: str = "", **props: str) -> TextElement:
    """An element that holds nothing but text, which is never read as markup."""
    element = TextElement(tag=tag, text=words)
    if classes:
        element.classes(classes)
    for name, value in props.items():
        element.props[name.replace("_", "-")] = value
    return element


def heading(level: int, words: str) -> TextElement:
    """A heading."""
    return text(f"h{level}", words)


class Table:
    """A table whose rows may be replaced; the first cell of a row is its header.

    Args:
        caption: what it shows.
        headings: of its columns.
        links: column of links, whose targets `fill` is given; None: there is none.
        long: columns whose texts may take several lines.
        empty: what stands in place of rows when there are none.
    """

    def __init__(
        self,
        caption: str,
        headings: Sequence[str],
        *,
        links: int | None = None,
        long: Sequence[int] = (),
        empty: str = "",
    ) -> None:
        self._links = links
        self._long = frozenset(long)
        self._rows: list[tuple[Element, list[TextElement]]] = []
        with Element("div").classes("scroll"), Element("table"):
            text("caption", caption)
            with Element("thead"), Element("tr"):
                for name in headings:
                    text("th", name, scope="col")
            self._body = Element("tbody")
            with self._body, Element("tr") as self._nothing:
                text("td", empty, colspan=str(len(headings)))

    def fill(
        self,
        rows: Sequence[Sequence[str]],
        *,
        targets: Sequence[str] = (),
        states: Sequence[str] = (),
    ) -> None:
        """Show these rows.

        Args:
            rows: their texts.
            targets: of each row's link.
            states: `good`, `bad` or nothing, for the first cell of each row.
        """
        while len(self._rows) < len(rows):
            self._add(len(rows[0]))
        self._nothing.set_visibility(not rows)
        for position, (line, cells) in enumerate(self._rows):
            line.set_visibility(position < len(rows))
            if position >= len(rows):
                continue
            for cell, words in zip(cells, rows[position], strict=True):
                if cell.text != words:
                    cell.text = words
            if self._links is not None:
                _set_prop(cells[self._links], "href", targets[position])
            if states:
                _set_state(cells[0], states[position])

    def _add(self, columns: int) -> None:
        with self._body, Element("tr") as line:
            cells = []
            for column in range(columns):
                cell = Element("th" if column == 0 else "td")
                if column == 0:
                    cell.props["scope"] = "row"
                if column in self._long:
                    cell.classes("long")
                with cell:
                    cells.append(text("a" if column == self._links else "span"))
            self._rows.append((line, cells))


class Fields:
    """Names and their values."""

    def __init__(self, names: Sequence[str]) -> None:
        self._values: dict[str, TextElement] = {}
        with Element("dl"):
            for name in names:
                text("dt", name)
                self._values[name] = text("dd")

    def fill(self, values: dict[str, str]) -> None:
        """Show these values."""
        for name, words in values.items():
            if self._values[name].text != words:
                self._values[name].text = words


class Alerts:
    """Sentences that somebody has to read; a screen reader says them when they come."""

    def __init__(self) -> None:
        self._lines: list[TextElement] = []
        self._box = Element("div").classes("alerts")
        self._box.props["role"] = "alert"

    def fill(self, sentences: Sequence[str]) -> None:
        """Show these."""
        while len(self._lines) < len(sentences):
            with self._box:
                self._lines.append(text("p"))
        for position, line in enumerate(self._lines):
            line.set_visibility(position < len(sentences))
            words = sentences[position] if position < len(sentences) else ""
            if line.text != words:
                line.text = words


class Chart:
    """A chart, with what it shows in words below it."""

    def __init__(self, title: str) -> None:
        self._shown: dict[str, Any] = {}
        with Element("figure"):
            heading(2, title)
            self._chart = ui.echart({"series": []}).style("height: 15rem; width: 100%")
            self._caption = text("figcaption")

    def fill(self, options: dict[str, Any], words: str) -> None:
        """Draw this."""
        if options == self._shown:
            return
        self._shown = options
        self._caption.text = words
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()


def _set_prop(element: TextElement, name: str, value: str) -> None:
    if element.props.get(name) != value:
        element.props[name] = value
        element.update()


def _set_state(element: TextElement, state: str) -> None:
    element.classes(replace=f"state {state}".strip())
