"""The kernels give the same bits as the references on aarch64, which this machine emulates."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from torch import Tensor

from recpoint.kernels.allocation import cpu as allocation
from recpoint.kernels.allocation import reference as allocation_reference
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.bit_packing import reference as bit_packing
from recpoint.kernels.erasure import reference as erasure
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, default_method, grid, reference
from recpoint.kernels.row_digest import reference as row_digest

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = next(filter(None, map(shutil.which, ("qemu-aarch64", "qemu-aarch64-static"))), None)

pytestmark = [
    pytest.mark.nightly("aarch64"),
    pytest.mark.skipif(EMULATOR is None, reason="not run: qemu-user is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("ziglang") is None, reason="not run: ziglang is not installed"
    ),
]


def test_every_operation_has_the_bits_of_its_reference(tmp_path: Path) -> None:
    program, calls = tmp_path / "play", tmp_path / "calls"
    # The program never uses the functions that Python calls. The linker drops them, so the program
    # links without Python.
    command = [
        *(sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-std=c++20"),
        *("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
        *("-DRECPOINT_SET=baseline", "-DPy_LIMITED_API=0x030B0000", "-fno-exceptions", "-static"),
        *("-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"),
        f"-I{sysconfig.get_path('include')}",
        *(str(ROOT / "tests/cross/play.cpp"), str(ROOT / "kernels/native/pool.cpp")),
        *("-o", str(program)),
    ]
    subprocess.run(command, check=True, timeout=600)
    with calls.open("wb") as file:
        count = _write_calls(file)
    assert EMULATOR is not None
    played = subprocess.run(
        [EMULATOR, str(program), str(calls)], capture_output=True, text=True, timeout=600
    )
    assert played.stdout == f"{count} calls, 0 wrong\n", played.stderr


def _write_calls(file: BinaryIO) -> int:
    torch.manual_seed(5)
    count = 0
    for dim in (1, 3, 4, 8, 16, 17, 64, 128, 200):
        rows = 0.1 * torch.randn(37, dim)
        rows[3] = 0.25
        rows[5, 0] = float("nan")
        rows[7] *= 1e-30
        rows[9] = -0.0
        for bits in BITS:
            greedy = Method(name="greedy", bins=9, ratio_permille=600)
            for method in (ASYMMETRIC, SYMMETRIC, default_method(bits), greedy):
                for half in (False, True):
                    count += _write_quantize(file, rows, bits, method, half)
            packed, scale, offset, *_ = reference.quantize_packed(rows, bits)
            decoded = reference.dequantize_packed(packed, scale, offset, dim=dim, bits=bits)
            codes = torch.randint(0, 2**bits, (len(rows), dim), dtype=torch.uint8)
            expected = [bit_packing.pack(codes, bits), codes]
            count += _write(file, "pack", [len(rows), dim, bits], [], [codes], expected)
            given = [packed, scale, offset]
            count += _write(file, "dequantize", [len(rows), dim, bits], [], given, [decoded])
        importance = torch.logspace(-2, 6, len(rows))
        prices = torch.tensor(allocation.prices(dim, 0.1, 32), dtype=torch.float64)
        widths = allocation_reference.allocate(rows, importance, 0.1)
        arrays = [rows, importance, prices]
        count += _write(file, "allocate", [len(rows), dim], [], arrays, [widths])
        ids = torch.randperm(1000)[: len(rows)]
        digest = np.array([row_digest.digest(rows, ids)], np.uint64)
        count += _write(file, "digest", [len(rows), 4 * dim], [], [rows, ids], [digest])
        chosen = torch.randint(0, len(rows), (90,))
        numbers = [len(chosen), 4 * dim]
        count += _write(file, "gather", numbers, [], [rows, chosen], [rows[chosen]])
        count += _write_parities(file, dim)
    for density in (0.01, 0.5):
        marked = torch.nonzero(torch.rand(200_000) < density).flatten()
        bits_of = np.zeros(200_000, np.uint8)
        bits_of[marked.numpy()] = 1
        bitmap = np.packbits(bits_of, bitorder="little")
        shuffled = marked[torch.randperm(len(marked))]
        numbers = [len(marked), 200_000]
        count += _write(file, "mark", numbers, [], [shuffled], [bitmap, marked])
        gaps = marked.diff() - 1
        planes = (gaps & 255).to(torch.uint8)
        rest = (gaps >> 8).tolist()
        symbols = b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in rest)
        given = [marked]
        count += _write(file, "symbols", [len(marked), 1], [], given, [planes, symbols])
    return count


def _write_parities(file: BinaryIO, row_bytes: int) -> int:
    data = [torch.randint(0, 256, (37, row_bytes), dtype=torch.uint8) for _ in range(5)]
    expected = [torch.empty_like(data[0]) for _ in range(3)]
    coefficients = torch.randint(0, 256, (len(data),), dtype=torch.uint8)
    erasure.encode(data, expected[:2])
    erasure.combine(data, coefficients.tolist(), expected[2])
    written = _write(file, "parity", [data[0].nbytes], [], [*data, coefficients], expected)
    slots, positions = torch.randint(0, 9, (37,)), torch.randint(0, 255, (37,))
    parity = torch.randint(0, 256, (9, row_bytes), dtype=torch.uint8)
    changed = parity.clone()
    erasure.apply(changed, slots, data[0], positions)
    given = [parity, slots, data[0], positions]
    return written + _write(file, "apply", [37, row_bytes], [], given, [changed])


def _write_quantize(file: BinaryIO, rows: Tensor, bits: int, method: Method, half: bool) -> int:
    (n, dim), name = rows.shape, method.name
    expected = list(reference.quantize_packed(rows, bits, method, half_parameters=half))
    numbers = [n, dim, bits, bits, name == "symmetric", half]
    floats, given = [], [rows]
    limits = [float(grid.error_unit(dim)), float(grid.largest_error(dim))]
    if name == "greedy":
        steps = grid.greedy_steps(method.bins, method.ratio_permille)
        numbers += [0, 0, method.bins, steps]
        floats, given = [0.0, 0.0, *limits], [rows, rows]
    elif name == "refit" and (places := grid.fraction_bits(dim, bits)):
        pairs = torch.from_numpy(grid.candidates(dim, bits, method.bins).copy())
        numbers += [len(pairs), method.refits, 0, 0]
        spacing = grid.half_spacing(dim, bits, method.bins)
        floats, given = [spacing, float(1 << places), *limits], [rows, pairs]
    return _write(file, "quantize", numbers, floats, given, expected)


def _write(
    file: BinaryIO,
    name: str,
    numbers: Sequence[int],
    floats: Sequence[float],
    given: Sequence[object],
    expected: Sequence[object],
) -> int:
    """Write a call. Return 1, the number of calls."""
    file.write(np.int64(len(name)).tobytes() + name.encode())
    file.write(np.array([len(numbers), *numbers], np.int64).tobytes())
    floats_bytes = np.array(floats, np.float32).tobytes()
    file.write(np.int64(len(floats_bytes)).tobytes() + floats_bytes)
    for arrays in (given, expected):
        file.write(np.int64(len(arrays)).tobytes())
        for array in arrays:
            content = _bytes(array)
            file.write(np.int64(len(content)).tobytes() + content)
    return 1


def _bytes(array: object) -> bytes:
    if isinstance(array, Tensor):
        return array.contiguous().numpy().tobytes()
    if isinstance(array, np.ndarray):
        return array.tobytes()
    assert isinstance(array, bytes)
    return array
