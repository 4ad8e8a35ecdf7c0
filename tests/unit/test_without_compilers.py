"""The PATH of an environment without a compiler has all other programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.installations import COMPILERS, without_compilers


def test_only_compilers_are_missing(tmp_path: Path) -> None:
    (links := tmp_path / "programs").mkdir()
    path = without_compilers(os.environ["PATH"], links)
    for compiler in ("c++", "g++", "gcc", "cc", "clang", "clang++"):
        assert shutil.which(compiler, path=path) is None
    assert subprocess.run(["sh", "-c", "exit 3"], env={"PATH": path}, check=False).returncode == 3
    for program in ("sh", "env", "tar"):
        assert shutil.which(program, path=path)


@pytest.mark.parametrize(
    ("program", "compiles"),
    [("g++-12", True), ("x86_64-linux-gnu-gcc-12", True), ("c++", True), ("clang++-14", True)]
    + [("gcc-ar", False), ("python3", False), ("ccache", False), ("bcc", False)],
)
def test_names_of_compilers(program: str, compiles: bool) -> None:
    assert bool(COMPILERS.fullmatch(program)) == compiles
