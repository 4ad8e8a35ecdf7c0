"""Parts of the live page that are filled again and again: only what changed goes to the browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from recpoint.dashboards.texts import NONE, Alert, Figure, path_pieces, spans

__all__ = [
    "STYLE",
    "Alerts",
    "Chart",
    "Fields",
    "Figures",
    "PageTable",
    "Text",
    "heading",
    "section",
    "set_state",
    "text",
]

#: The whole style of the page; no font or script comes from elsewhere.
STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


class Text(TextElement):
    """An element that holds nothing but words, which are never read as markup.

    A line ends inside a path only after one of its slashes, if the next piece fits into a line. The
    places are `wbr` elements: who copies the words gets no other characters. A heading or link also
    carries the words as its accessible name: of pieces, a browser would make a name with spaces.
    """

    def __init__(self, tag: str, words: str = "") -> None:
        super().__init__(tag=tag, text="")
        self._named = tag in ("a", "h1", "h2", "h3")
        self._words = ""
        self.fill(words)

    def fill(self, words: str) -> None:
        """Show these words; nothing is sent if they are shown already."""
        if words == self._words:
            return
        self._words = words
        first, *pieces = path_pieces(words)
        if self.default_slot.children:
            self.clear()
        if self._named:
            self.props["aria-label"] = words
        self.text = first
        with self:
            for piece in pieces:
                Element("wbr")
                TextElement(tag="span", text=piece)


def text(tag: str, words: str = "", classes: str = "", **props: str) -> Text:
    """An element that holds nothing but text; see `Text`."""
    element = Text(tag, words)
    if classes:
        element.classes(classes)
    for name, value in props.items():
        element.props[name.replace("_", "-")] = value
    return element


def heading(level: int, words: str) -> Text:
    """A heading."""
    return text(f"h{level}", words)


def section(title: str) -> Element:
    """A part of the page with a heading; both are hidden together."""
    with Element("section") as box:
        heading(2, title)
    return box


class _AlertLine:
    """The cause of an alarm as a sentence, and what to do next with its commands as code."""

    def __init__(self, tag: str) -> None:
        self._next_step = ""
        with Element(tag).classes("alarm") as self._box:
            self._cause = text("span", classes="cause")
            self._next = Element("span").classes("next")

    def fill(self, alert: Alert | None) -> None:
        """Show this alert; None: nothing."""
        self._box.set_visibility(alert is not None)
        cause, next_step = alert or Alert("", "")
        self._cause.fill(cause)
        if next_step == self._next_step:
            return
        self._next_step = next_step
        self._next.clear()
        with self._next:
            for words, command in spans(f"Next: {next_step}" if next_step else ""):
                text("code" if command else "span", words)


class Alerts:
    """Alarms that somebody has to read; a screen reader reads them out when they appear."""

    def __init__(self) -> None:
        self._lines: list[_AlertLine] = []
        self._box = Element("div")
        self._box.props["role"] = "alert"

    def fill(self, alerts: Sequence[Alert]) -> None:
        """Show these alerts."""
        while len(self._lines) < len(alerts):
            with self._box:
                self._lines.append(_AlertLine("p"))
        for position, line in enumerate(self._lines):
            line.fill(alerts[position] if position < len(alerts) else None)


class _Row:
    """One row of a table: its cells, and the row below it that holds a remark."""

    def __init__(self, headings: Sequence[str], classes: Sequence[str], links: int | None) -> None:
        self.cells: list[Text] = []
        self._boxes: list[Element] = []
        with Element("tr") as self._line:
            self._line.props["role"] = "row"
            for column, name in enumerate(headings):
                box = Element("th" if column == 0 else "td").classes(classes[column])
                box.props["role"] = "cell" if column else "rowheader"
                box.props["data-heading"] = name
                if column == 0:
                    box.props["scope"] = "row"
                with box:
                    self.cells.append(text("a" if column == links else "span"))
                self._boxes.append(box)
        self._remark: tuple[Element, _AlertLine] | None = None

    def add_remark(self) -> None:
        """Make room for a remark below the row."""
        with Element("tr") as line:
            line.props["role"] = "row"
            with Element("td").classes("remark") as box:
                box.props["role"] = "cell"
                box.props["colspan"] = str(len(self.cells))
                self._remark = (line, _AlertLine("div"))

    def fill(self, row: Sequence[str] | None, remark: Alert | None = None) -> None:
        """Show these texts; None: nothing."""
        self._line.set_visibility(row is not None)
        if self._remark is not None:
            noted = row is not None and remark is not None
            self._remark[0].set_visibility(noted)
            self._remark[1].fill(remark if noted else None)
            _set_class(self._line, "noted", noted)
        for box, cell, words in zip(self._boxes, self.cells, row or (), strict=False):
            cell.fill(words)
            _set_class(box, "none", words == NONE)


class PageTable:
    """A table whose rows may be replaced; the first cell of a row is its header.

    The roles are written out: a browser forgets them when the style shows rows as cards.

    Args:
        caption: what it shows.
        headings: of its columns.
        links: column of links, whose targets `fill` is given; None: there is none.
        long: columns whose texts may take several lines.
        lines: columns whose texts hold line breaks, and break nowhere else.
        numbers: columns of numbers, which stand at the right.
        remarks: whether a row may have a remark below it.
    """

    def __init__(
        self,
        caption: str,
        headings: Sequence[str],
        *,
        links: int | None = None,
        long: Sequence[int] = (),
        lines: Sequence[int] = (),
        numbers: Sequence[int] = (),
        remarks: bool = False,
    ) -> None:
        self._headings = headings
        self._links = links
        self._remarks = remarks
        self._rows: list[_Row] = []
        kinds = {"long": long, "lines": lines, "number": numbers}
        self._classes = [
            " ".join(kind for kind, columns in kinds.items() if column in columns)
            for column in range(len(headings))
        ]
        with Element("div").classes("scroll") as box, Element("table") as table:
            box.props.update({"role": "region", "tabindex": "0", "aria-label": caption})
            table.props["role"] = "table"
            text("caption", caption)
            with Element("thead") as head, Element("tr") as line:
                head.props["role"], line.props["role"] = "rowgroup", "row"
                for name, classes in zip(headings, self._classes, strict=True):
                    text("th", name, classes, scope="col", role="columnheader")
            self._body = Element("tbody")
            self._body.props["role"] = "rowgroup"

    def fill(
        self,
        rows: Sequence[Sequence[str]],
        *,
        targets: Sequence[str] = (),
        states: Sequence[str] = (),
        remarks: Sequence[Alert | None] = (),
    ) -> None:
        """Show these rows.

        Args:
            rows: their texts.
            targets: of each row's link.
            states: `good`, `bad` or nothing, for the first cell of each row.
            remarks: of each row; None: the row has none.
        """
        while len(self._rows) < len(rows):
            with self._body:
                row = _Row(self._headings, self._classes, self._links)
                if self._remarks:
                    row.add_remark()
            self._rows.append(row)
        for position, line in enumerate(self._rows):
            if position >= len(rows):
                line.fill(None)
                continue
            line.fill(rows[position], remarks[position] if remarks else None)
            if self._links is not None:
                _set_prop(line.cells[self._links], "href", targets[position])
            if states:
                set_state(line.cells[0], states[position])


class Figures:
    """The headline figure and those beside it, each with its name and a note below its value."""

    def __init__(self, names: Sequence[str]) -> None:
        self._shown: dict[str, tuple[Element, Text, Text]] = {}
        with Element("dl").classes("figures") as self._box:
            for position, name in enumerate(names):
                with Element("div").classes("" if position else "headline") as box:
                    text("dt", name)
                    self._shown[name] = (
                        box,
                        text("dd", classes="value"),
                        text("dd", classes="note"),
                    )

    def fill(self, figures: dict[str, Figure]) -> None:
        """Show these figures; one that is not given is hidden."""
        self._box.set_visibility(bool(figures))
        for name, (box, value, note) in self._shown.items():
            box.set_visibility(name in figures)
            shown = figures.get(name, Figure("", ""))
            value.fill(shown.value)
            note.fill(shown.note)


class Fields:
    """Names and their values."""

    def __init__(self, names: Sequence[str]) -> None:
        self._values: dict[str, tuple[Text, Text]] = {}
        with Element("dl").classes("facts"):
            for name in names:
                self._values[name] = (text("dt", name), text("dd"))

    def fill(self, values: dict[str, str]) -> None:
        """Show these values; a name without a value is hidden."""
        for name, (term, value) in self._values.items():
            words = values.get(name, "")
            term.set_visibility(bool(words))
            value.set_visibility(bool(words))
            value.fill(words)


class Chart:
    """A chart, with what it shows in words below it.

    It is drawn as SVG: its colours are the variables of the style, and follow the colour scheme.
    """

    def __init__(self, title: str) -> None:
        self._shown: dict[str, Any] = {}
        with Element("figure"):
            heading(3, title)
            self._chart = ui.echart({"series": []}, renderer="svg").classes("chart")
            self._chart.props["role"] = "img"
            self._caption = text("figcaption")

    def fill(self, options: dict[str, Any], words: str) -> None:
        """Draw this."""
        self._caption.fill(words)
        if options == self._shown:
            return
        self._shown = options
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()


def set_state(element: TextElement, state: str) -> None:
    """Show the colour of a state: `good`, `bad` or none."""
    element.classes(replace=f"state {state}".strip())


def _set_prop(element: TextElement, name: str, value: str) -> None:
    if element.props.get(name) != value:
        element.props[name] = value
        element.update()


def _set_class(element: Element, name: str, is_set: bool) -> None:
    if is_set:
        element.classes(add=name)
    else:
        element.classes(remove=name)
