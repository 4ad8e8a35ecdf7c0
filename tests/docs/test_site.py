"""The site builds without a warning, is whole, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import recpoint

pytestmark = pytest.mark.nightly("site")

ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 240

#: Builds the site as `make docs` does, whose environment has none of these packages.
_BUILD = """
import runpy, sys
absent = ("lightning", "nicegui", "pandas", "prefect", "s3fs", "torch", "torchrec")
sys.modules.update(dict.fromkeys(absent))
runpy.run_module("mkdocs", run_name="__main__", alter_sys=True)
"""

#: Attributes whose address a browser loads; `<a href>` is followed only by a reader.
_LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("source", "src"),
    ("source", "srcset"),
    ("iframe", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("video", "src"),
    ("audio", "src"),
    ("link", "href"),
    ("image", "href"),
    ("use", "href"),
    ("form", "action"),
}
_OF_ANOTHER_HOST = re.compile(r"\s*(https?:)?//", re.I)
_IN_CSS = re.compile(r"@import\s+(?:url\()?[\"']?([^\"')\s;]+)|url\(\s*[\"']?([^\"')]+)", re.I)


class _Addresses(HTMLParser):
    """What a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._in_style = tag == "style"
        if tag == "link" and given.get("rel") in ("canonical", "alternate", "next", "prev"):
            return
        self.found += [v for k, v in attrs if v and (tag, k) in _LOADED]
        self.found += _of_css(given.get("style") or "")
        assert "mermaid" not in (given.get("class") or ""), "the theme would load it from a CDN"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += _of_css(data)


def _of_css(text: str) -> list[str]:
    return [first or second for first, second in _IN_CSS.findall(text)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, "build", "--strict", "--site-dir", str(there)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return there


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    seen = 0
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            page = _Addresses()
            page.feed(path.read_text())
            addresses = page.found
        elif path.suffix in (".css", ".svg"):
            addresses = _of_css(path.read_text())
        else:
            continue
        seen += len(addresses)
        away = [one for one in addresses if _OF_ANOTHER_HOST.match(one)]
        assert not away, f"{path.relative_to(site)}: {away}"
    assert seen > 100


def test_an_address_of_another_host_is_found() -> None:
    page = _Addresses()
    page.feed(
        '<script src="https://a/x.js"></script><link rel="stylesheet" href="//b/x.css">'
        '<style>@import "https://c/x.css"; p {background: url(https://d/x.png)}</style>'
        '<a href="https://e">e</a><img src="x.png">'
    )
    away = [one for one in page.found if _OF_ANOTHER_HOST.match(one)]
    assert [re.sub(r".*//|/.*", "", one) for one in away] == ["a", "b", "c", "d"]


def test_every_public_name_has_its_reference(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    modules = {"embeddings", "errors", "__version__"}
    missing = [n for n in recpoint.__all__ if n not in modules and f'id="recpoint.{n}"' not in page]
    assert not missing
    tables = [getattr(recpoint.embeddings, name) for name in recpoint.embeddings.__all__]
    missing = [n.__name__ for n in tables if f'id="{n.__module__}.{n.__qualname__}"' not in page]
    assert not missing
    errors = (site / "reference" / "errors.html").read_text()
    assert not [n for n in recpoint.errors.__all__ if f'id="recpoint.errors.{n}"' not in errors]


def test_every_decision_is_listed(site: Path) -> None:
    page = (site / "decisions" / "index.html").read_text()
    content = page[page.index("<article") : page.index("</article>")]
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert records
    assert not [r.name for r in records if f'href="{r.stem}.html"' not in content]


def test_every_command_has_its_reference(site: Path) -> None:
    page = (site / "reference" / "command-line.html").read_text()
    for command in ("agent", "restore", "server start", "prometheus rules", "info"):
        assert f"<code>recpoint {command}</code>" in page, command
