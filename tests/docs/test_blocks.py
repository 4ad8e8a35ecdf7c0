"""Every block of code in docs/ that a reader could run is run, or says why it is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.example import Example

from tests.docs.blocks import Shell, page_blocks, runnable
from tests.flows.runbook import entries
from tests.forked_shell import forked_programs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

#: `test_runbook` plays the console blocks of these pages.
PLAYED = {f"how-to/{name}.md" for name in entries()}


def _examples(path: Path) -> list[Example]:
    page = path.relative_to(DOCS).as_posix()
    return [
        example
        for example in Sybil(parsers=[page_blocks]).parse(path).examples()
        if page not in PLAYED or example.parsed.language != "console"
    ]


#: Pages that start servers and ranks, in a Python of their own each.
LONG = {"how-to/embedding-servers.md", "how-to/several-ranks.md"}


def _pages() -> list[object]:
    """Return pages that have a block of code."""
    pages = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return [
        pytest.param(path, id=name, marks=[pytest.mark.nightly("site")] if name in LONG else [])
        for name, path in pages.items()
        if _examples(path)
    ]


@pytest.mark.parametrize("page", _pages())
def test_blocks_of(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = _examples(page)
    directory = tmp_path / "page"
    directory.mkdir()
    programs = [Path(sys.executable).parent]
    runs = any(runnable(e.parsed) and e.parsed.not_run is None for e in examples)
    if runs and (forked := forked_programs()) is not None:
        programs.insert(0, forked)
    for name in [n for n in os.environ if n.startswith(("PREFECT_", "AWS_", "RECPOINT_"))]:
        monkeypatch.delenv(name)
    for name in ("COLUMNS", "RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, programs), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")]))
    monkeypatch.setenv("RECPOINT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RECPOINT_STAGING", str(tmp_path / "staging"))
    monkeypatch.chdir(directory)
    with Shell(directory, dict(os.environ)) as shell:
        for example in examples:
            example.namespace["the shell"] = shell
            example.evaluate()
