"""Plays the tutorials as a reader does: an empty environment, then the commands of the page.

    python tests/tutorials.py [NAME ...]

`make tutorials` runs it, outside `make test`: it installs packages, and takes minutes. For each
page in docs/tutorials it makes a new directory and a new virtual environment, installs a wheel of
what is committed here with the extras that the page names, writes the files that the page shows,
and runs the page's `console` and `sh` blocks in order. Nothing is kept; the last lines say what
came out.

What a page has to keep to:

- A block with `pip install` is not run as it stands. Its `pip install` line of recpoint becomes one
  of the wheel with the same extras, after the CPU build of torch. Other lines are run, with the
  versions of constraints.txt unless they say `--no-deps`.
- One shell runs the blocks, so a directory and variables hold for later blocks, and so do processes
  in the background. Each command of a `console` block has to print the lines below it in this
  order; `…` stands for anything within a line. Without lines it has to end with exit code 0.
- `<!-- not run: make tutorials runs it in terminal 2 -->` before a block stands for a second
  terminal. Its command goes on while later blocks are run; the next block waits until the command
  has printed the lines below it. `make test` leaves out each block with a mark `not run`; this
  program leaves out those whose mark does not say `make tutorials runs it`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "PAGES",
    "ROOT",
    "TORCH",
    "Block",
    "blocks",
    "export_commit",
    "missing_line",
    "pip_installs",
    "reader_environment",
    "run_or_show",
]

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "tutorials"

#: A bare `torch` could be the CUDA build, which takes gigabytes.
TORCH = "torch==2.13.0"
_COMMAND_SECONDS = 600.0
_INSTALL_SECONDS = 1800.0
_MARK = re.compile(r"<!-- not run: (.*) -->")
_TERMINAL = re.compile(r"make tutorials runs it(?: in terminal (\d))?")
T = TypeVar("T")
_TITLE = re.compile(r'title="([^"]+)"')
_EXTRAS = re.compile(r"recpoint\S*\[([a-z0-9,]+)\]")


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        tag: the language.
        title: name of the file that it shows; None: it shows none.
        mark: why `make test` does not run it; None: it does.
        text: its lines.
    """

    tag: str
    title: str | None
    mark: str | None
    text: str

    @property
    def terminal(self) -> int | None:
        """The terminal that it is for; None: nobody runs it."""
        if self.mark is None:
            return 1
        match = _TERMINAL.match(self.mark)
        return int(match[1] or 1) if match else None

    def commands(self) -> list[tuple[str, list[str]]]:
        """Its commands, each with the lines that it has to print."""
        if self.tag != "console":
            return [(self.text, [])]
        commands: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            elif line.startswith("> "):
                commands[-1] = f"{commands[-1][0]}\n{line[2:]}", []
            elif line:
                commands[-1][1].append(line)
        return commands


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found_blocks: list[Block] = []
    mark: str | None = None
    head: str | None = None
    lines: list[str] = []
    for line in page.read_text().splitlines():
        if head is not None:
            if line != "```":
                lines.append(line)
                continue
            title = _TITLE.search(head)
            tag = head.split()[0] if head.split() else ""
            text = "".join(f"{line}\n" for line in lines)
            found_blocks.append(Block(tag, title[1] if title else None, mark, text))
            head = mark = None
        elif line.startswith("```"):
            head, lines = line[3:], []
        elif line:
            marked = _MARK.fullmatch(line)
            mark = marked[1] if marked else None
    return found_blocks


def missing_line(expected: list[str], said: str) -> str | None:
    """The first of the lines that `said` has not, after those before it; None: it has them all."""
    output_left = re.sub(r"[ \t]+", " ", said)
    for line in expected:
        parts = [re.escape(" ".join(part.split())) for part in line.split("…")]
        match = re.search("[^\n]*".join(parts), output_left)
        if match is None:
            return line
        output_left = output_left[match.end() :]
    return None


class Terminal:
    """A bash that commands are typed into, and all that it prints.

    Args:
        directory: where it starts.
        environment: its variables.
    """

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._output = ""
        self._number = 0
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, command: str, expected: list[str], seconds: float = _COMMAND_SECONDS) -> None:
        """Run a command to its end.

        Raises:
            AssertionError: it does not print what is expected, or ends with an error.
            TimeoutError: it does not end.
        """
        self._number += 1
        mark = f"<ended {self._number}:"
        start = len(self._output)
        # What it starts must not read the commands that follow.
        self._type(f"{{\n{command}\n}} </dev/null; echo '{mark}'$?'>'\n")
        pattern = re.compile(re.escape(mark) + r"(\d+)>")
        ended = self._wait(lambda output: pattern.search(output, start), command, seconds)
        output = self._output[start : ended.start()]
        missing = missing_line(expected, output)
        if missing is not None:
            raise AssertionError(f"$ {command}\nnot printed: {missing}\nprinted:\n{output}")
        if not expected and ended[1] != "0":
            raise AssertionError(f"$ {command}\nexit code {ended[1]}\nprinted:\n{output}")

    def start(self, command: str, expected: list[str]) -> None:
        """Start a command that goes on, and wait until it has printed what is expected.

        Raises:
            TimeoutError: it does not print it.
        """
        start = len(self._output)
        self._type(f"{{\n{command}\n}} </dev/null\n")
        self._wait(
            lambda output: None if missing_line(expected, output[start:]) else output,
            command,
            _COMMAND_SECONDS,
        )

    def close(self) -> None:
        """End it, and what it has started."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, kind)
            except ProcessLookupError:
                break
            time.sleep(3.0 if kind == signal.SIGTERM else 0.0)
        self._process.wait()

    def _type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._output += line
                self._news.notify_all()

    def _wait(self, look: Callable[[str], T | None], command: str, seconds: float) -> T:
        deadline = time.monotonic() + seconds
        with self._news:
            while (value := look(self._output)) is None:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    raise TimeoutError(
                        f"$ {command}\nafter {seconds:.0f} s:\n{self._output[-5000:]}"
                    )
                self._news.wait(seconds_left)
        return value


def pip_installs(page: list[Block]) -> list[list[str]]:
    """The words of each `pip install` command of a page; other lines need not be a shell's."""
    lines = (
        line.removeprefix("$ ")
        for block in page
        for line in block.text.replace("\\\n", " ").splitlines()
    )
    return [shlex.split(line, comments=True) for line in lines if line.startswith("pip install ")]


def export_commit(directory: Path) -> Path:
    """Write what is committed here to `directory`/sources, so that no build lies in the checkout.

    Returns:
        That directory.
    """
    sources = directory / "sources"
    sources.mkdir()
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(sources)], input=archive, check=True)
    return sources


def run_or_show(*command: str, seconds: float, **options: Any) -> str:
    """Run a program and return what it printed; if it fails, print that.

    Raises:
        subprocess.SubprocessError: it failed, or did not end in time.
    """
    ended = subprocess.run(
        command,
        check=False,
        timeout=seconds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    if ended.returncode:
        print(ended.stdout, flush=True)
        raise subprocess.CalledProcessError(ended.returncode, command)
    return str(ended.stdout)


def _build_wheel(directory: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    run_or_show(
        *pip,
        "--no-deps",
        f"--wheel-dir={directory}",
        str(export_commit(directory)),
        seconds=_INSTALL_SECONDS,
    )
    (wheel,) = directory.glob("recpoint-*.whl")
    return wheel


def _install(page: list[Block], python: Path, wheel: Path) -> None:
    """Install what the page tells its reader to install."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    pinned = ["-c", str(ROOT / "constraints.txt")]

    def install(*what: str) -> None:
        run_or_show(*pip, *pinned, *what, seconds=_INSTALL_SECONDS)

    install(TORCH)
    for words in pip_installs(page):
        recpoint = next((word for word in words if "recpoint" in word), None)
        if recpoint is not None:
            extras = _EXTRAS.search(recpoint)
            install(f"{wheel}[{extras[1]}]" if extras else str(wheel))
        elif "--no-deps" in words:  # versions that constraints.txt may not have
            run_or_show(*pip, *words[2:], seconds=_INSTALL_SECONDS)
        elif not words[2].startswith("torch"):
            install(*words[2:])


def reader_environment(directory: Path, programs: Path) -> dict[str, str]:
    """Variables of a reader who has set none."""
    foreign = ("PREFECT_", "AWS_", "RECPOINT_", "PYTHON", "RUN")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return clean | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(programs.parent),
        "RECPOINT_HOME": str(directory / "home"),
        "RECPOINT_STAGING": str(directory / "staging"),
        "RECPOINT_SERVER_PORT": str(_free_port()),
        "PREFECT_HOME": str(directory / "home" / "client"),
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _terminals(directory: Path, environment: dict[str, str]) -> Iterator[dict[int, Terminal]]:
    open_ones: dict[int, Terminal] = {}
    try:
        yield open_ones
    finally:
        for terminal in open_ones.values():
            terminal.close()
        if Path(environment["VIRTUAL_ENV"], "bin", "prefect").exists():
            subprocess.run(
                ["recpoint", "server", "stop"],
                env=environment,
                cwd=directory,
                check=False,
                stdout=subprocess.DEVNULL,
            )


def play(name: str, wheel: Path, directory: Path) -> None:
    """Play one page in `directory`, which is empty.

    Raises:
        AssertionError: a command did not print what the page says, or ended with an error.
        TimeoutError: a command did not end in ten minutes.
    """
    page = blocks(PAGES / f"{name}.md")
    programs = directory / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
    start_s = time.monotonic()
    _install(page, programs / "python", wheel)
    print(f"{name}: installed in {time.monotonic() - start_s:.0f} s", flush=True)
    work = directory / "work"
    work.mkdir()
    environment = reader_environment(directory, programs)
    with _terminals(work, environment) as terminals:
        for block in page:
            if block.title is not None:
                (work / block.title).write_text(block.text)
                continue
            number = block.terminal
            if block.tag not in ("console", "sh", "bash") or number is None:
                continue
            if number not in terminals:
                terminals[number] = Terminal(work, environment)
            for command, expected in block.commands():
                print(f"{name}: {number}$ {command.strip()}", flush=True)
                if number == 1:
                    terminals[number].run(command, expected)
                else:
                    terminals[number].start(command, expected)


def main(names: list[str]) -> int:
    """Play the pages of these names, or all; the number of those that failed."""
    pages = [path.stem for path in sorted(PAGES.glob("*.md")) if path.stem != "index"]
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="recpoint-tutorials.") as folder:
        wheel = _build_wheel(Path(folder))
        for name in names or pages:
            directory = Path(folder) / name
            directory.mkdir()
            start_s = time.monotonic()
            try:
                play(name, wheel, directory)
            except (AssertionError, TimeoutError, subprocess.SubprocessError) as error:
                print(error, flush=True)
                outcomes[name] = "failed"
            else:
                outcomes[name] = "passed"
            outcomes[name] += f", {time.monotonic() - start_s:.0f} s"
            print(f"{name}: {outcomes[name]}", flush=True)  # removing what it wrote takes a while
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return sum(outcome.startswith("failed") for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
