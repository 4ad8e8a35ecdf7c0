"""Machine code on disk belongs to the sources that it was compiled from, all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import recpoint

PROGRAM = """
import torch
from recpoint.kernels.quantize import quantize
print(quantize(torch.tensor([[0.0, 1.3, 3.0]]), 2).codes.tolist())
"""
ROUNDED, SHIFTED = "_splat(_FLOATS, 0.5)", "_splat(_FLOATS, 0.8)"

LOGGED = "import logging\nlogging.basicConfig(level=logging.INFO)\n" + PROGRAM


def said(kept_in: Path, **environment: str) -> list[str]:
    """What a process says of compiling while it quantizes."""
    done = subprocess.run(
        [sys.executable, "-c", LOGGED],
        env=os.environ | {"NUMBA_CACHE_DIR": str(kept_in)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.strip() == "[[0, 1, 3]]"
    return [line for line in done.stderr.splitlines() if "compiling kernels" in line]


def test_a_process_that_compiles_says_so_once(tmp_path: Path) -> None:
    (line,) = said(tmp_path / "cache")
    assert line.startswith("INFO:recpoint:") and "loaded by later starts" in line
    assert said(tmp_path / "cache") == []


def test_a_process_that_can_keep_nothing_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "recpoint"
    source = Path(recpoint.__file__).parent
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for kernel in (folder / "kernels").glob("**/"):
        (kernel / "__pycache__").write_text("a file where machine code would be kept")
    nowhere = tmp_path / "a file"
    nowhere.touch()
    kept = {"PYTHONPATH": str(tmp_path), "HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere)}
    (line,) = said(Path(), **kept, NUMBA_CACHE_DIR="", PYTHONDONTWRITEBYTECODE="1")
    assert "each process does so" in line and line.endswith(
        "Next: set NUMBA_CACHE_DIR to one that it can write"
    )


def test_a_changed_file_is_compiled_into_the_kernels_that_use_it(tmp_path: Path) -> None:
    folder = tmp_path / "recpoint"
    source = Path(recpoint.__file__).parent
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))

    def codes() -> str:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        return done.stdout.strip()

    assert codes() == "[[0, 1, 3]]"
    assert list(folder.glob("kernels/quantize/__pycache__/*.nbi")), "nothing is kept on disk"
    # An update of the package, in which one file differs and those that call it do not.
    vectors = folder / "kernels" / "quantize" / "vectors.py"
    text = vectors.read_text(encoding="utf-8")
    assert text.count(ROUNDED) == 1
    vectors.write_text(text.replace(ROUNDED, SHIFTED), encoding="utf-8")
    assert codes() == "[[0, 2, 3]]"
