"""Writes the matrix in Markdown, for the docs."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.faults.matrix import system_of
from benchmarks.faults.verdicts import Outcome
from benchmarks.machine import commit

__all__ = ["markdown"]

_SHORT = {
    Outcome.SURVIVED: "survived",
    Outcome.CLEAR: "clear",
    Outcome.UNCLEAR: "unclear",
    Outcome.SILENT: "**silent loss**",
    Outcome.NOT_APPLICABLE: "–",
}


def markdown(faults: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, the counts, and why each cell is not `survived`.

    Args:
        faults: the rows.
        results: what was measured, by name of system: `cells`, `versions`, `not_run`.
    """
    ran = [name for name, result in results.items() if not result["not_run"]]
    lines = [
        f"Measured on {datetime.now(UTC):%Y-%m-%d}, commit {commit()}, "
        f"Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}.",
        "",
        _row(["", *(system_of(name).title for name in ran)]),
        _row(["---"] * (len(ran) + 1)),
    ]
    for fault in faults:
        cells = [_SHORT[Outcome(results[name]["cells"][fault]["outcome"])] for name in ran]
        lines.append(_row([fault, *cells]))
    for outcome in Outcome:
        counts = [_count(results[name]["cells"], outcome) for name in ran]
        lines.append(_row([f"*{outcome.value}*", *map(str, counts)]))
    lines += ["", "## Versions and use", "", _row(["system", "versions", "used"])]
    lines.append(_row(["---"] * 3))
    for name, result in results.items():
        versions = ", ".join(
            f"{package} {version}" for package, version in result["versions"].items()
        )
        kind = system_of(name)
        lines.append(_row([kind.title, result["not_run"] or versions, kind.used]))
    lines += ["", "## Cell by cell", ""]
    for name in ran:
        lines += [f"### {system_of(name).title}", "", _row(["fault", "outcome", "why"])]
        lines.append(_row(["---"] * 3))
        for fault in faults:
            cell = results[name]["cells"][fault]
            lines.append(_row([fault, cell["outcome"], _plain(cell["why"])]))
        lines.append("")
    return "\n".join(lines)


def _count(cells: Mapping[str, Mapping[str, str]], outcome: Outcome) -> int:
    return sum(cell["outcome"] == outcome.value for cell in cells.values())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


#: A path of this machine, of which only the name matters.
_PATH = re.compile(r"(?:/[\w.+-]+){2,}/(?=[\w.+-])")


def _plain(text: str) -> str:
    """Return text that is safe in a table of Markdown, without paths of this machine."""
    text = _PATH.sub("…/", text)
    for mark in "|<>`*_[]":
        text = text.replace(mark, {"|": "/"}.get(mark, f"\\{mark}"))
    return text
