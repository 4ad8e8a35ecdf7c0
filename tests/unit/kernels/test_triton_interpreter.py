"""The Triton kernels, run by Triton's interpreter on any machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parents[2] / "gpu"
FILES = sorted(path.name for path in GPU_TESTS.glob("test_*_gpu.py"))


def test_each_operation_has_a_file_of_parity_tests() -> None:
    operations = ["bit_packing", "dirty_bitmap", "quantize", "row_gather"]
    assert [f"test_{operation}_gpu.py" for operation in operations] == FILES


@pytest.mark.nightly("triton")
# What takes longest by itself, and the others together: a process takes seconds to begin.
@pytest.mark.parametrize("files", [FILES[2:3], FILES[:2] + FILES[3:]], ids=["quantize", "others"])
def test_kernels_equal_their_reference_in_the_interpreter(files: list[str]) -> None:
    # Triton decides when a kernel is defined whether it is interpreted: hence a process of its own.
    tests = [str(GPU_TESTS / name) for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=GPU_TESTS.parents[1],
        capture_output=True,
        text=True,
        timeout=1500,  # minutes, and more where others have the cores
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    summary = output.strip().splitlines()[-1]
    assert re.match(r"\d+ passed in ", summary), f"something was skipped or warned about:\n{output}"
