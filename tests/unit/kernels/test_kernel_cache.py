"""Machine code on disk belongs to the sources that it was compiled from, all of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import recpoint
from tests.torch_interpreter import run_program

PROGRAM = """
import torch
from recpoint.kernels.quantize import quantize
print(quantize(torch.tensor([[0.0, 1.3, 3.0]]), 2).codes.tolist())
"""
ROUNDED, SHIFTED = "_splat(_FLOATS, 0.5)", "_splat(_FLOATS, 0.8)"

COUNTED = """
import logging, resource
from pathlib import Path
from recpoint.kernels import dirty_bitmap, dirty_rows
logging.basicConfig(level=logging.INFO)
bitmap = dirty_bitmap.new(64)
bitmap[0] = 7
"""
ALONE = COUNTED + "print(dirty_bitmap.count(bitmap))\n"
IN_ANOTHER = COUNTED + "print(*dirty_rows.count([bitmap], rows=[64]).counts)\n"
TWO_KERNELS = ALONE + "print(*dirty_rows.count([bitmap], rows=[64]).counts)\n"
ONCE, OFTEN = "total += set_bits(pairs[i])", "total += np.uint64(1000) * set_bits(pairs[i])"


def said(kept_in: Path, **environment: str) -> list[str]:
    """What a process says of compiling while it runs two kernels."""
    kept = {"NUMBA_CACHE_DIR": str(kept_in)}
    done = run_program(TWO_KERNELS, environment=os.environ | kept | environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n3\n"
    return [line for line in done.stderr.splitlines() if "compiling kernels" in line]


def copied_package(to: Path) -> Path:
    """A copy of the package that a program started there imports; nothing is compiled yet."""
    source = Path(recpoint.__file__).parent
    shutil.copytree(source, to / "recpoint", ignore=shutil.ignore_patterns("__pycache__"))
    return to / "recpoint"


def changed(file: Path, text: str, new: str) -> None:
    """What an update of the package does."""
    before = file.read_text(encoding="utf-8")
    assert before.count(text) == 1
    file.write_text(before.replace(text, new), encoding="utf-8")


def printed(program: str, place: Path) -> tuple[list[str], str]:
    """Lines that a program prints that uses the package there, and what it logs."""
    used = {"PYTHONPATH": str(place), "NUMBA_CACHE_DIR": str(place / "cache")}
    done = run_program(program, environment=os.environ | used, directory=place)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_process_that_compiles_says_so_once(tmp_path: Path) -> None:
    (line,) = said(tmp_path / "cache")
    assert line.startswith("INFO:recpoint:") and "loaded by later starts" in line
    assert said(tmp_path / "cache") == []


def test_a_process_that_can_keep_nothing_says_what_to_do(tmp_path: Path) -> None:
    folder = copied_package(tmp_path)
    for kernel in (folder / "kernels").glob("**/"):
        (kernel / "__pycache__").write_text("a file where machine code would be kept")
    nowhere = tmp_path / "a file"
    nowhere.touch()
    kept = {"PYTHONPATH": str(tmp_path), "HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere)}
    (line,) = said(Path(), **kept, NUMBA_CACHE_DIR="", PYTHONDONTWRITEBYTECODE="1")
    assert "each process does so" in line and line.endswith(
        "Next: set NUMBA_CACHE_DIR to one that it can write"
    )


def test_an_update_on_a_full_disk_runs_nothing_that_was_compiled_before(tmp_path: Path) -> None:
    kernels = copied_package(tmp_path) / "kernels"
    assert printed(ALONE, tmp_path)[0] == ["3"]
    changed(kernels / "dirty_bitmap" / "cpu.py", ONCE, OFTEN)
    # There is room for what says where the machine code is, and none for that.
    room = "bitmap[0] = 7\nresource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
    found, told = printed(ALONE.replace("bitmap[0] = 7\n", room), tmp_path)
    assert found == ["3000"]
    assert told.count("compiled kernels are not kept there") == 1 and "Next: make room" in told
    assert printed(ALONE, tmp_path)[0] == ["3000"]


def test_what_is_compiled_after_an_update_is_kept_for_what_was_imported(tmp_path: Path) -> None:
    file = copied_package(tmp_path) / "kernels" / "dirty_bitmap" / "cpu.py"
    new = file.read_text(encoding="utf-8").replace(ONCE, OFTEN)
    updated = COUNTED + f"Path({str(file)!r}).write_text({new!r}, encoding='utf-8')\n"
    assert printed(IN_ANOTHER.replace(COUNTED, updated), tmp_path)[0] == ["3"]
    assert OFTEN in file.read_text(encoding="utf-8")
    assert printed(IN_ANOTHER, tmp_path)[0] == ["3000"]


def test_files_that_are_damaged_are_compiled_again(tmp_path: Path) -> None:
    copied_package(tmp_path)
    assert printed(ALONE, tmp_path)[0] == ["3"]
    for suffix in ("nbi", "nbc"):
        (file,) = (tmp_path / "cache").rglob(f"*count_words*.{suffix}")
        os.truncate(file, 10)
        found, told = printed(ALONE, tmp_path)
        assert found == ["3"] and "is compiled again: what is kept is damaged" in told
    assert printed(ALONE, tmp_path) == (["3"], "")


def test_a_changed_file_is_compiled_into_the_kernels_that_use_it(tmp_path: Path) -> None:
    folder = copied_package(tmp_path)

    def codes() -> str:
        used = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": ""}
        done = run_program(PROGRAM, environment=os.environ | used, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert codes() == "[[0, 1, 3]]"
    assert list(folder.glob("kernels/quantize/__pycache__/*.nbi")), "nothing is kept on disk"
    # An update of the package, in which one file differs and those that call it do not.
    changed(folder / "kernels" / "quantize" / "vectors.py", ROUNDED, SHIFTED)
    assert codes() == "[[0, 2, 3]]"
