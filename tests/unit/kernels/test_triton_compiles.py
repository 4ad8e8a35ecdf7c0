"""The Triton kernels, compiled for a Hopper GPU on any machine.

The interpreter takes what the compiler refuses, and shows nothing of the code that a GPU would run.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recpoint.kernels.bit_packing import BITS

triton = pytest.importorskip("triton")

BY_NIGHT = pytest.mark.nightly("triton")

POINTERS = {
    "table": "*i64", "descriptors": "*i64", "ids": "*i64", "ends": "*i64", "counts": "*i32",
    "bitmap": "*i32", "into": "*i32", "other": "*i32",
    "scales": "*fp32", "offsets": "*fp32", "rows": "*fp32", "candidates": "*fp32",
    "codes": "*u8", "packed": "*u8", "exacts": "*u8", "wides": "*u8", "nearby": "fp32",
}  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], **types: str) -> str:
    """The PTX of a kernel for capability 9.0; counts are i32, pointers as in `POINTERS`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, POINTERS.get(name, "i32"))
        for name in names
    }
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if signature[parameter.name].startswith("*")
        and not parameter.do_not_specialize_on_alignment
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(code.asm["ptx"])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_marks_need_no_exchange_between_threads() -> None:
    from recpoint.kernels.dirty_bitmap import triton as kernels

    sizes = {"BLOCK": 1024, "ROUNDS": 4}
    codes = [compiled(kernels._mark, sizes, rows="i64")]
    for narrow, wide in ((True, False), (False, True), (True, True)):
        kinds = {"SLOTS": 32, "NARROW": narrow, "WIDE": wide}
        codes.append(compiled(kernels._mark_many, sizes | kinds))
    for code in codes:
        assert "ld.global.cg.b32" in code, "a cached word would hide bits that were set since"
        assert re.search(r"(atom|red)\.global\.\S*relaxed\S*\.or\.b32", code)
        assert "bar.sync" not in code


def test_the_other_kernels_of_bitmaps_and_packing_compile() -> None:
    from recpoint.kernels.bit_packing import triton as packing
    from recpoint.kernels.dirty_bitmap import triton as kernels

    sizes = {"SLOTS": 64, "BLOCK": 1024, "ROUNDS": 4}
    for narrow, wide in (("*i32", "*i64"), ("*i64", "*i32")):
        code = compiled(kernels._mark_features, sizes, ids=wide, offsets=narrow, n="i64")
        assert re.search(r"(atom|red)\.global\.\S*relaxed\S*\.or\.b32", code)
    scan = {"SLOTS": 64, "BLOCK": 512}
    assert "st.global" in compiled(kernels._count_many, scan)
    assert "st.global.b64" in compiled(kernels._collect_many, scan)
    assert "st.global" in compiled(kernels._merge, {"BLOCK": 1024})
    for bits in BITS:
        sizes = {"BITS": bits, "BLOCK": 1024}
        assert "st.global.b8" in compiled(packing._pack, sizes) + compiled(packing._unpack, sizes)


@pytest.mark.parametrize("into_table", [False, True])
def test_rows_are_moved_in_sixteen_bytes(into_table: bool) -> None:
    from recpoint.kernels.row_gather import triton as kernels

    sizes = {"SLOTS": 32, "UNITS": 512, "INTO_TABLE": into_table}
    code = compiled(kernels._move_many, sizes, ids="*i64")
    found = Counter(re.findall(r"(?:ld|st)\.global\.v4\.b32", code))
    assert found == {"ld.global.v4.b32": 4, "st.global.v4.b32": 4}


def shape(dim: int, bits: int) -> dict[str, Any]:
    columns = max(8, triton.next_power_of_2(dim))
    return {
        "DIM": dim, "LEVELS": 2**bits - 1, "CODE_BITS": bits, "HAS_IDS": True, "HALF": True,
        "PAIRS": bits == 4 and (dim * bits + 7) // 8 % 2 == 0, "ROWS": max(1, 2048 // columns),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "bits", "dtype"),
    [
        (64, 4, "*fp32"),
        (13, 3, "*fp32"),
        pytest.param(64, 8, "*fp16", marks=BY_NIGHT),
        pytest.param(16, 2, "*i16", marks=BY_NIGHT),
        pytest.param(5000, 3, "*fp32", marks=BY_NIGHT),
    ],
)
def test_quantizers_fuse_and_approximate_nothing(dim: int, bits: int, dtype: str) -> None:
    from recpoint.kernels.quantize import triton as kernels

    sizes = shape(dim, bits)
    columns = min(2048, 2048 // sizes["ROWS"])
    parts = min(4, columns // 8)
    sizes |= {"PART": columns // parts, "PARTS": parts, "SYMMETRIC": dim == 16}
    sizes["ROWS"] = 2048 // columns
    packed = "*i16" if sizes["PAIRS"] else "*u8"
    code = compiled(kernels._quantize, sizes, table=dtype, packed=packed)
    require_exact(code)
    if dim == 64 and dtype == "*fp32":
        assert code.count("ld.global.v4.b32") == 4, "rows are not read in sixteen bytes"


@pytest.mark.parametrize(
    ("dim", "bits", "greedy"),
    [
        (64, 2, True),
        pytest.param(64, 4, False, marks=BY_NIGHT),
        (13, 3, False),
        pytest.param(4096, 2, False, marks=BY_NIGHT),
    ],
)
def test_searches_fuse_and_approximate_nothing(dim: int, bits: int, greedy: bool) -> None:
    from recpoint.kernels.quantize import grid
    from recpoint.kernels.quantize import triton as kernels

    sizes = shape(dim, bits)
    sizes |= {
        "GREEDY": greedy, "TRIALS": 25, "STEPS": 3, "UNIT": float(grid.error_unit(dim)),
        "FRACTION": 2.0 ** grid.fraction_bits(dim, bits), "LARGEST": grid.largest_error(dim),
        "LEVELINGS": 2, "COARSER": grid.coarser(dim, bits),
        "COLUMNS": triton.next_power_of_2(dim),
    }  # fmt: skip
    packed = "*i16" if sizes["PAIRS"] else "*u8"
    require_exact(compiled(kernels._quantize_searched, sizes, table="*fp32", packed=packed))


def test_decoding_fuses_and_approximates_nothing() -> None:
    from recpoint.kernels.quantize import triton as kernels

    require_exact(compiled(kernels._dequantize, {"BLOCK": 1024}))


def require_exact(code: str) -> None:
    inexact = re.findall(r"fma\.\S+|mad\.\S*f\d\d|\S+\.ftz\S*|div\.(?:full|approx)\S*", code)
    assert not inexact, f"operations that round otherwise than the reference: {set(inexact)}"
