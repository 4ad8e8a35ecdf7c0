"""Runs the blocks of code of a page under docs/, in order, in a directory of the page's own."""

from __future__ import annotations

import os
import re
import select
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from sybil import Document, Example, Region
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.polling import PATIENCE_SECONDS

__all__ = ["Block", "Shell", "page_blocks", "runnable"]

_RUNNABLE = {"python", "py", "pycon", "console", "sh", "bash", "shell"}
_FENCES = RawFencedCodeBlockLexer(re.compile(r"(?P<info>[^\n]*)\n"))
_HIDDEN = re.compile(r"^<!-- run: (?P<info>python|sh)\n(?P<source>.*?)^-->", re.M | re.S)
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>[^\n]*\S) -->\s*\Z")
_TITLE = re.compile(r'title="([^"]+)"')


class Block(NamedTuple):
    """A block of code: its language, the file that it is, if any, and why it is not run, if so."""

    language: str
    title: str | None
    source: str
    not_run: str | None


def page_blocks(document: Document) -> Iterator[Region]:
    """A parser for Sybil: every block of a page, hidden ones too."""
    for region in _FENCES(document):
        words = region.lexemes["info"].split()
        title = _TITLE.search(region.lexemes["info"])
        why = _NOT_RUN.search(document.text[: region.start])
        block = Block(
            language=words[0] if words else "",
            title=title and title[1],
            source=region.lexemes["source"],
            not_run=why and why["why"],
        )
        yield Region(region.start, region.end, block, _run)
    for hidden in _HIDDEN.finditer(document.text):
        block = Block(hidden["info"], None, hidden["source"], None)
        yield Region(hidden.start(), hidden.end(), block, _run)


def runnable(block: Block) -> bool:
    """Whether a test runs it, or it has to say why not."""
    return block.language in _RUNNABLE and block.title is None


def _run(example: Example) -> None:
    block: Block = example.parsed
    shell: Shell = example.namespace["the shell"]
    assert block.language, f"{example.path}:{example.line}: a block without a language"
    if block.title is not None:
        (shell.directory / block.title).write_text(block.source)
    elif block.not_run is not None or block.language not in _RUNNABLE:
        return
    elif block.language == "python":
        names: dict[str, Any] = example.namespace.setdefault("the names", {"__name__": "page"})
        # Line numbers of tracebacks are those of the page.
        text = "\n" * example.line + block.source
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            exec(compile(text, example.path, "exec"), names)
    elif block.language == "console":
        _converse(shell, block.source, f"{example.path}:{example.line}")
    elif block.language in ("sh", "bash"):
        code, printed = shell.run(block.source)
        assert code == 0, f"{example.path}:{example.line}: exit code {code}\n{printed}"
    else:
        raise AssertionError(f"{example.path}:{example.line}: no test runs {block.language}")


def _converse(shell: Shell, source: str, place: str) -> None:
    for step in re.split(r"(?m)^\$ ", source)[1:]:
        lines = step.splitlines()
        command = [lines.pop(0)]
        while command[-1].endswith("\\"):
            command.append(lines.pop(0).removeprefix("> "))
        expected = [line for line in lines if line.strip() not in ("", "…")]
        code, printed = shell.run("\n".join(command))
        assert expected or code == 0, f"{place}: $ {command}: exit code {code}\n{printed}"
        rest = re.sub(r"[ \t]+", " ", printed)
        for line in expected:
            parts = (re.escape(" ".join(part.split())) for part in line.split("…"))
            # Blanks beside a … may be a part of what it stands for.
            match = re.search("[^\n]*".join(parts), rest)
            assert match, f"{place}: $ {command}\nnot printed: {line}\nprinted:\n{printed}"
            rest = rest[match.end() :]


class Shell:
    """One bash for the blocks of a page.

    Args:
        directory: it begins here.
        environment: all that it has.
    """

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self._output = directory.parent / f"{directory.name}.output"
        self._read = 0
        self._told = os.pipe()  # exit codes
        with self._output.open("ab") as output:  # forked programs open it, too
            self._bash = subprocess.Popen(
                ["bash"],
                cwd=directory,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._told[1:],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._bash.stdin is not None
        try:
            # Programs in the background end with the page.
            if self._bash.poll() is None:
                self._bash.stdin.write(b"kill $(jobs -p) 2>/dev/null; wait; exit\n")
                self._bash.stdin.close()
                self._bash.wait(PATIENCE_SECONDS)
        finally:
            if self._bash.poll() is None:
                os.killpg(self._bash.pid, 9)  # of the session that this object began
                self._bash.wait()
            for end in self._told:
                os.close(end)

    def run(self, commands: str) -> tuple[int, str]:
        """Run commands; the exit code of the last, and what was printed meanwhile."""
        assert self._bash.stdin is not None
        quoted = commands.replace("'", "'\\''")
        # Commands do not read what follows them in bash's input.
        line = f"eval '{quoted}\n' </dev/null; echo $? >&{self._told[1]}\n"
        self._bash.stdin.write(line.encode())
        self._bash.stdin.flush()
        if not select.select([self._told[0]], [], [], PATIENCE_SECONDS)[0]:
            raise TimeoutError(f"no end in {PATIENCE_SECONDS:.0f} s: {commands}")
        code = os.read(self._told[0], 100)
        assert code, f"bash has ended: {commands}"
        text = self._output.read_bytes()[self._read :]
        self._read += len(text)
        return int(code), text.decode(errors="replace")
