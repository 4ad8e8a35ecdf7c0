"""Adds to the site what is not a file under docs/; mkdocs.yml names this file as a hook."""

from __future__ import annotations

import os
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from recpoint.cli import app
from recpoint.cli.reporting import EXIT_CODES
from recpoint.errors import RecpointError

__all__ = ["on_config", "on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

#: A page that shows a file from outside docs/ has this directory before the file's path.
_SHOWN = "source"

_FENCE = re.compile(r"^[ \t]*(```+|~~~+).*?^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^][]|\[[^][]*\])*)\]\((?P<target>[^()\s]+)\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision record into the navigation, in the place of `decisions/*`."""
    config.nav = _with_decisions(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ to which a page links."""
    for path in sorted({path for file in files for path in _linked(file)}):
        files.append(
            File.generated(
                config, _page_of(path), content=_shown(path), inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and lead links to files outside docs/ to their pages."""
    uri = page.file.src_uri
    if uri.startswith("decisions/"):
        # Guides and reference are found first. A word of a title counts a thousandfold.
        page.meta["search"] = {"boost": 0.001}
    fill = {
        "decisions/index.md": ("decisions", _decisions),
        "reference/command-line.md": ("commands", _commands),
        "reference/exit-codes.md": ("exit codes", _exit_codes),
    }.get(uri)
    if fill is not None:
        mark = f"<!-- generated: {fill[0]} -->"
        if mark not in markdown:
            raise ValueError(f"docs/{uri} lacks the line {mark}")
        markdown = markdown.replace(mark, fill[1]())
    shows = uri.startswith(f"{_SHOWN}/")
    # The place in the repository that the links of this text start from.
    origin = _file_of(uri) if shows else f"docs/{uri}"

    def follow(link: re.Match[str]) -> str:
        path, _, anchor = _resolved(origin, link["target"])
        if path is None:
            return link[0]
        if path.startswith("docs/"):
            there = path.removeprefix("docs/") or "index.md"
        else:
            there = _page_of(path)
        if files.get_file_from_path(there) is None:
            # A link of a file that is only shown here; of any other page the build says it.
            return link["text"] if shows else link[0]
        return f"[{link['text']}]({posixpath.relpath(there, posixpath.dirname(uri))}{anchor})"

    return _outside_code(markdown, follow)


def _outside_code(markdown: str, follow: Any) -> str:
    """The text with every link replaced that is not in a block of code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(follow, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(follow, markdown[end:])])


def _linked(file: File) -> Iterator[str]:
    """The files outside docs/, by their path in the repository, to which a page links."""
    if not file.is_documentation_page():
        return
    for link in _LINK.finditer(_FENCE.sub("", file.content_string)):
        path, inside, _ = _resolved(f"docs/{file.src_uri}", link["target"])
        if path is not None and not inside:
            yield path


def _resolved(origin: str, target: str) -> tuple[str | None, bool, str]:
    """The file that a link leads to, whether docs/ holds it, and the anchor. None: no such file.

    A link to a directory leads to its README.md.
    """
    path, hash_, anchor = target.partition("#")
    if not path or ":" in path or path.startswith("/"):
        return None, False, ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    if path.startswith(".."):
        return None, False, ""
    if (ROOT / path).is_dir():
        path += "/index.md" if path.startswith("docs/") else "/README.md"
    inside = path.startswith("docs/")
    there = (ROOT / path).is_file() and not os.path.isabs(path)
    return (path if there or inside else None), inside, hash_ + anchor


def _page_of(path: str) -> str:
    # index.md and README.md would become the index of a directory, which other pages may need.
    return f"{_SHOWN}/{path}" if path.endswith(".md") else f"{_SHOWN}/{path}.md"


def _file_of(uri: str) -> str:
    path = uri.removeprefix(f"{_SHOWN}/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _shown(path: str) -> str:
    text = (ROOT / path).read_text()
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.endswith(".md"):
        return head + text
    language = _LANGUAGES.get(Path(path).suffix, "text")
    fence = "`" * 5
    return f"{head}# {Path(path).name}\n\n`{path}`\n\n{fence}{language}\n{text}{fence}\n"


def _with_decisions(nav: list[Any]) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if entry == "decisions/*":
            found += [f"decisions/{path.name}" for path in _records()]
        elif isinstance(entry, dict):
            found.append(
                {
                    title: _with_decisions(below) if isinstance(below, list) else below
                    for title, below in entry.items()
                }
            )
        else:
            found.append(entry)
    return found


def _records() -> list[Path]:
    return sorted((DOCS / "decisions").glob("[0-9]*.md"))


def _decisions() -> str:
    lines = []
    for path in _records():
        heading = path.read_text().splitlines()[0].removeprefix("# ")
        number, _, title = heading.partition(" ")
        lines.append(f"- {number}: [{title}]({path.name})")
    return "\n".join(lines)


def _commands() -> str:
    """The page of the command line, as `typer utils docs` writes it, one level further down."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="recpoint")
    text = get_docs_for_click(obj=command, ctx=context, name="recpoint", indent=1)
    # The page has said it: everything up to the first command's heading but the list of commands.
    text = text[text.index("**Options**") :]
    # Lines that a help text indents become a block of code.
    text = re.sub(r"(?m)(?<=\S\n)((?:^ {2,}\S.*\n)+)", _as_code, text)
    return text.replace("```console", "```text")


def _as_code(lines: re.Match[str]) -> str:
    return "\n" + textwrap.indent(textwrap.dedent(lines[0]), "    ") + "\n"


def _exit_codes() -> str:
    rows = ["| code | exceptions |", "|---|---|"]
    by_code: dict[int, list[str]] = {}
    for kind, code in EXIT_CODES:
        name = f"`{kind.__name__}`"
        if issubclass(kind, RecpointError):
            name = f"[{name}](errors.md#recpoint.errors.{kind.__name__})"
        by_code.setdefault(code, []).append(name)
    rows += [f"| {code} | {', '.join(names)} |" for code, names in sorted(by_code.items())]
    return "\n".join(rows)
