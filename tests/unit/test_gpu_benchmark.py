"""The benchmark of the Triton kernels, as far as a machine without a GPU can run it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.torch_interpreter import run_program

ROOT = Path(__file__).resolve().parents[2]

#: What a machine that only measures kernels need not have.
MISSING = [
    *("zstandard", "rich", "pydantic", "crc32c", "fsspec", "safetensors", "psutil"),
    "recpoint.kernels.native._native",
]
WITHOUT_THEM = f"import sys\nfor name in {MISSING}: sys.modules[name] = None\n"

GATE = """
import torch
from benchmarks.gpu_correctness import check
print(check(torch.device("cpu"), rows=700, seed=torch.seed() % 2**31))
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program(program, environment=os.environ | environment, directory=ROOT)


@pytest.mark.parametrize("before", ["", WITHOUT_THEM], ids=["installed", "bare"])
def test_the_gate_compares_every_kernel_with_its_reference(before: str) -> None:
    done = run(before + GATE, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


ONE_BIT_OFF = """
from benchmarks import gpu_kernels
triton = gpu_kernels.load()["quantize"].triton
right = triton.quantize_rows
def one_bit_off(*arguments, **options):
    found = right(*arguments, **options)
    found.packed[-1, -1] ^= 1
    return found
triton.quantize_rows = one_bit_off
"""
MERGED_NOTHING = """
from benchmarks import gpu_kernels
gpu_kernels.load()["dirty_bitmap"].triton.merge = lambda into, other: None
"""


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (ONE_BIT_OFF, "quantize_rows, asymmetric, 2 bits of dim 64"),
        (MERGED_NOTHING, "mark and merge: result 0"),
    ],
    ids=["quantize", "merge"],
)
def test_the_gate_stops_at_a_kernel_that_differs(wrong: str, named: str) -> None:
    done = run(wrong + GATE, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode != 0
    assert named in done.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_bare_machine_is_told_so_and_no_figure_is_claimed() -> None:
    records = sorted((ROOT / "benchmarks" / "results").iterdir())
    program = "from benchmarks.__main__ import main\nraise SystemExit(main(['gpu']))"
    done = run(WITHOUT_THEM + program)
    assert done.returncode == 0, done.stderr
    assert "not run: no CUDA device" in done.stdout
    assert "the load by others is unknown: psutil is not installed" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["figures"] == {}
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == records
