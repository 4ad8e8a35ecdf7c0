"""A host without memory for what a kernel works with: an error, and never codes nobody wrote."""

from __future__ import annotations

import sys

import pytest

from tests.torch_interpreter import run_program

PROGRAM = """
import re
import resource
import sys
from pathlib import Path

import torch

from recpoint.kernels import quantize

DIM = 1 << 26
room = {"none": DIM // 2, "some": 2 * DIM}[sys.argv[2]]


def left(room):
    mapped = re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())
    return int(mapped[1]) * 1024 + room


def encode(dim):
    rows = torch.zeros(1, dim)
    rows[0, 7] = 255.0
    return dim // 2, lambda: quantize.quantize_packed(rows, 4)


def decode(dim):
    codes = torch.full((1, dim // 2), 0x11, dtype=torch.uint8)
    scale, offset = torch.ones(1), torch.zeros(1)
    return 4 * dim, lambda: quantize.dequantize_packed(codes, scale, offset, dim=dim, bits=4)


make = {"encode": encode, "decode": decode}[sys.argv[1]]
make(64)[1]()  # imports what is imported late
out_bytes, work = make(DIM)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (left(out_bytes + room), before[1]))
try:
    found = work()
except MemoryError:
    print("refused")
    raise SystemExit from None
finally:
    resource.setrlimit(resource.RLIMIT_AS, before)
if sys.argv[1] == "encode":
    codes = found.packed
    assert not found.exact.any() and codes[0, 3] == 0xF0 and torch.count_nonzero(codes) == 1
else:
    assert bool((found == 1).all())
print("done")
"""


@pytest.mark.parametrize("work", ["encode", "decode"])
@pytest.mark.parametrize("room", ["none", "some"])
@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by what it has mapped")
def test_codes_are_written_or_an_error_is_raised(work: str, room: str) -> None:
    done = run_program(PROGRAM, work, room)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == ("refused\n" if room == "none" else "done\n")
