"""Installs recpoint in new environments, with and without a compiler, and runs the demo in each.

    python -m tests.installations [with] [without]

`make installations` runs it, outside `make test`: it installs packages, and takes minutes. Each
environment is a new directory with a new virtual environment and the sources of what is committed
here. `with` keeps PATH, whose compiler builds the kernels. `without` has a PATH of links to all
programs except compilers, so the build takes Zig's from PyPI. `recpoint info` then has to name that
compiler, and `recpoint demo`, which kills its trainer and resumes it, has to end bit-identical. The
last lines are rows for tests/TUTORIAL_RUNS.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.tutorials import ROOT, TORCH, export_commit, reader_environment

__all__ = ["COMPILERS", "without_compilers"]

#: Names of compilers of C and C++, with the prefixes and suffixes that distributions give them.
COMPILERS = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang|clang\+\+|c89|c99|tcc|zig)(-[0-9.]+)?")
_SECONDS = 1800.0


def without_compilers(path: str, directory: Path) -> str:
    """Fill `directory` with links to the programs of `path`, except compilers; the new PATH."""
    for folder in filter(os.path.isdir, path.split(os.pathsep)):
        for program in os.scandir(folder):
            link = directory / program.name
            # The first of a name wins, as in PATH.
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program.path)
    return str(directory)


def _install_and_play(directory: Path, environment: Mapping[str, str]) -> tuple[str, bool]:
    """Install the commit in `directory`, run the demo; the compiler, and how the demo ended."""
    programs = directory / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--quiet", "-c", str(ROOT / "constraints.txt")]
    sources = export_commit(directory)

    def run(*command: str) -> None:
        subprocess.run(command, env=environment, check=True, timeout=_SECONDS, cwd=directory)

    def document(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [str(programs / "recpoint"), *arguments, "--json"],
            env=environment,
            check=True,
            timeout=_SECONDS,
            cwd=directory,
            stdout=subprocess.PIPE,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    run(sys.executable, "-m", "venv", str(directory / "venv"))
    run(*pip, TORCH)
    run(*pip, f"{sources}[flows]")
    why = next(kernel["why"] for kernel in document("info")["kernels"] if kernel["name"])
    try:
        identical = document("demo")["resumed_bit_identical"] is True
    finally:
        stop = [str(programs / "recpoint"), "server", "stop"]
        subprocess.run(stop, env=environment, check=False, stdout=subprocess.DEVNULL)
    return why.partition("compiled by ")[2], identical


def main(names: list[str]) -> int:
    """Make the environments of these names, or both; the number of those that failed."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    rows, failed = [], 0
    for name in names or ["with", "without"]:
        with tempfile.TemporaryDirectory(prefix="recpoint-installation.") as folder:
            directory = Path(folder)
            environment = reader_environment(directory, directory / "venv" / "bin")
            del environment["VIRTUAL_ENV"]
            environment.pop("CXX", None)
            if name == "without":
                (links := directory / "programs").mkdir()
                environment["PATH"] = without_compilers(os.environ["PATH"], links)
            begun = time.monotonic()
            compiler, outcome = "", "failed"
            try:
                compiler, identical = _install_and_play(directory, environment)
                zig = name == "without"
                if identical and (not zig or "clang" in compiler):
                    outcome = '`"resumed_bit_identical": true`'
            except subprocess.SubprocessError as error:
                print(error, flush=True)
            failed += outcome == "failed"
            seconds = time.monotonic() - begun
        day = datetime.now(UTC).date()
        what = compiler if name == "with" else f"none: {compiler} from PyPI"
        rows.append(f"| {what} | {day} | {commit} | {seconds:.0f} | {outcome} |")
        print(rows[-1], flush=True)
    print("\n".join(rows))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
