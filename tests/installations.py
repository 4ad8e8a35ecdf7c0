"""Installs recpoint in new environments, and runs the demo in each.

    python -m tests.installations [with] [without] [debian]

`make installations` runs it, outside `make test`: it installs packages, and takes minutes. Each
environment is a new directory with a new virtual environment and the sources of what is committed
here. `with` keeps PATH, whose compiler builds the kernels. `without` has a PATH of links to all
programs except compilers, so the build takes Zig's from PyPI. `recpoint info` then has to name that
compiler. `debian` runs `make demo` with Debian 12's own Python, 3.11.2, and no other variables than
HOME and PATH; elsewhere than on Debian 12 it is not run. The demo, which kills its trainer and
resumes it, has to end bit-identical. The last lines are rows for tests/TUTORIAL_RUNS.md.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.tutorials import ROOT, TORCH, export_commit, reader_environment, run_or_show

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
    pip += ["-c", str(ROOT / "constraints.txt")]
    sources = export_commit(directory)

    def run(*command: str) -> None:
        run_or_show(*command, seconds=_SECONDS, env=environment, cwd=directory)

    def document(*arguments: str) -> dict[str, Any]:
        process = subprocess.run(
            [str(programs / "recpoint"), *arguments, "--json"],
            env=environment,
            check=True,
            timeout=_SECONDS,
            cwd=directory,
            stdout=subprocess.PIPE,
        )
        document: dict[str, Any] = json.loads(process.stdout)
        return document

    run(sys.executable, "-m", "venv", str(directory / "venv"))
    run(*pip, TORCH)
    run(*pip, f"{sources}[flows]")
    compiler = _compiled_by(document("info"))
    try:
        identical = document("demo")["resumed_bit_identical"] is True
    finally:
        _stop_server(programs, environment)
    return compiler, identical


def _make_demo(directory: Path, environment: Mapping[str, str]) -> tuple[str, bool]:
    """Run `make demo` in a clone of the commit, as on a bare Debian; as `_install_and_play`."""
    clone = directory / "clone"
    run_or_show("git", "clone", "--quiet", str(ROOT), str(clone), seconds=_SECONDS)
    bare = {
        name: value for name, value in environment.items() if name.startswith(("RECPOINT_", "HOME"))
    }
    bare["PATH"] = "/usr/bin:/bin"
    programs = clone / ".venv" / "bin"
    try:
        output = run_or_show("make", "demo", seconds=_SECONDS, env=bare, cwd=clone)
    finally:
        _stop_server(programs, bare)
    print(output, flush=True)
    identical = json.loads(output.splitlines()[-1])["resumed_bit_identical"] is True
    info = run_or_show(str(programs / "recpoint"), "info", "--json", seconds=_SECONDS, env=bare)
    return f"{_compiled_by(json.loads(info))}; Debian 12's Python", identical


def _compiled_by(info: dict[str, Any]) -> str:
    reason: str = next(kernel["why"] for kernel in info["kernels"] if kernel["name"])
    return reason.partition("compiled by ")[2]


def _stop_server(programs: Path, environment: Mapping[str, str]) -> None:
    if (programs / "recpoint").exists():
        stop = [str(programs / "recpoint"), "server", "stop"]
        subprocess.run(stop, env=environment, check=False, stdout=subprocess.DEVNULL)


def _is_debian_12() -> bool:
    system = platform.freedesktop_os_release()
    return (system["ID"], system.get("VERSION_ID")) == ("debian", "12")


def main(names: list[str]) -> int:
    """Make the environments of these names, or all; the number of those that failed."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    rows, failed = [], 0
    for name in names or ["with", "without", "debian"]:
        if name == "debian" and not _is_debian_12():
            rows.append("`debian` was not run: this system is not Debian 12")
            continue
        with tempfile.TemporaryDirectory(prefix="recpoint-installation.") as folder:
            directory = Path(folder)
            environment = reader_environment(directory, directory / "venv" / "bin")
            del environment["VIRTUAL_ENV"]
            environment.pop("CXX", None)
            if name == "without":
                (links := directory / "programs").mkdir()
                environment["PATH"] = without_compilers(os.environ["PATH"], links)
            start_s = time.monotonic()
            compiler, outcome = "", "failed"
            try:
                play = _make_demo if name == "debian" else _install_and_play
                compiler, identical = play(directory, environment)
                zig = name == "without"
                if identical and (not zig or "clang" in compiler):
                    outcome = '`"resumed_bit_identical": true`'
            except subprocess.SubprocessError as error:
                print(error, flush=True)
            failed += outcome == "failed"
            seconds = time.monotonic() - start_s
        day = datetime.now(UTC).date()
        label = f"none: {compiler} from PyPI" if name == "without" else compiler
        rows.append(f"| {label} | {day} | {commit} | {seconds:.0f} | {outcome} |")
        print(rows[-1], flush=True)
    print("\n".join(rows))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
