"""Measures the erasure kernels on one thread, against a memcpy and against pyeclib.

Speeds are bytes of data members in a second. An encoding reads each of these bytes once and writes
the parities. The memcpy of the same bytes reads each of them once, and writes it. All members are
parts of one tensor that is larger than the caches, and all outputs have been written before.

pyeclib is called as its users call it: with the joined members, as `bytes`. It returns each member
and each parity in a fragment of its own. Its encoder is that of ISA-L, whose parities are the same
bytes. Both sides encode 1 MiB, Swift's segment, in memory that malloc keeps: in fresh pages pyeclib
is twenty times slower. ISA-L alone, without the copies into fragments, is measured on the large
members where pyeclib's wheel has it.

The benchmark `parity` calls `measure`; `python -m benchmarks.erasure_kernels` runs it alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import keep_freed_memory, watch
from benchmarks.report import Report, Spread, alternate, print_report, ratio
from recpoint.installation import install_command
from recpoint.kernels import erasure
from recpoint.kernels.erasure import reference

__all__ = ["KEYS", "measure"]

KEYS = ("xor_vs_memcpy", "pq_vs_memcpy", "vs_pyeclib")

#: Data members of a stripe, as in the paper.
_DATA = (2, 4)
_ROW_BYTES = 512
_SEGMENT_BYTES = 1 << 20
#: Encodings of a segment in one timing.
_REPEATS = 8


class _Stripes(NamedTuple):
    """Data members [n, row_bytes], parts of `whole`; and room for a copy and for parities."""

    whole: Tensor
    members: list[Tensor]
    copy: Tensor
    outs: list[Tensor]


def measure(report: Report, *, smoke: bool) -> None:
    """Add the figures KEYS, each the worst of stripes of 2 and 4 data members, and notes.

    `vs_pyeclib` is the worst of one parity and two.
    """
    total_bytes, rounds = (1 << 20, 3) if smoke else (256 << 20, 15)
    _gate()
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios: dict[str, list[Spread]] = {key: [] for key in KEYS}
        for data in _DATA:
            _against_memcpy(report, ratios, _stripes(data, total_bytes), rounds)
        if importlib.util.find_spec("pyeclib") is not None:
            for data in _DATA:
                _against_pyeclib(report, ratios, _stripes(data, _SEGMENT_BYTES), rounds)
    finally:
        torch.set_num_threads(threads)
    for key, spreads in ratios.items():
        if spreads:
            report.put(key, min(spreads))
        else:
            report.leave_out([key], f"pyeclib is not installed: {install_command('bench')}")


def _gate() -> None:
    """Check parities and decoded members against the reference, on rows of odd lengths too."""
    for data, row_bytes in ((2, _ROW_BYTES), (4, 77)):
        members = [torch.randint(0, 256, (50, row_bytes)).byte() for _ in range(data)]
        expected = [torch.empty_like(members[0]) for _ in range(2)]
        reference.encode(members, expected)
        parities = erasure.encode(members, 2)
        survivors = dict(enumerate([*members, *parities]))
        lost = {k: survivors.pop(k) for k in range(2)}
        decoded = erasure.decode(survivors, data, lost)
        right = all(map(torch.equal, parities, expected))
        if not right or not all(torch.equal(decoded[k], rows) for k, rows in lost.items()):
            raise AssertionError(f"{data} members of {row_bytes} bytes: other rows came out")


def _stripes(data: int, total_bytes: int) -> _Stripes:
    n = total_bytes // data // _ROW_BYTES
    whole = torch.randint(0, 256, (data * n, _ROW_BYTES), dtype=torch.uint8)
    members = list(whole.split(n))
    outs = [torch.zeros_like(members[0]) for _ in range(2)]
    return _Stripes(whole, members, torch.zeros_like(whole), outs)


def _timed(
    report: Report, case: str, calls: dict[str, Callable[[], object]], size: int, rounds: int
) -> dict[str, list[float]]:
    """Time calls in turn, each of `size` bytes of data; return the seconds of each."""
    seconds = alternate(rounds + 1, *calls.values())
    # The first round brings code and pages.
    seconds_by_name = {
        name: name_seconds[1:] for name, name_seconds in zip(calls, seconds, strict=True)
    }
    speeds = []
    for name, name_seconds in seconds_by_name.items():
        middle = report.timed(f"{name}, {case}", name_seconds)
        speeds.append(f"{name} {size / middle / 1e9:.1f}")
    report.notes.append(f"GB/s of {case}, one thread: {'; '.join(speeds)}")
    return seconds_by_name


def _against_memcpy(
    report: Report, figures: dict[str, list[Spread]], stripes: _Stripes, rounds: int
) -> None:
    whole, members, copy, outs = stripes
    data = len(members)
    p, q = erasure.encode(members, 2)
    survivors = dict(enumerate(members[:-2])) | {data: p, data + 1: q}
    solved = erasure.decoding_coefficients(data, [data - 2, data - 1], survivors)[data - 1]
    rows, factors = [survivors[k] for k in solved], list(solved.values())
    calls: dict[str, Callable[[], object]] = {
        "memcpy": partial(copy.copy_, whole),
        "XOR": partial(erasure.encode, members, 1, outs[:1]),
        "P+Q": partial(erasure.encode, members, 2, outs),
        "one of two lost members": partial(erasure.combine, rows, factors, copy[: len(p)]),
    }
    encode = _isa_l(stripes)
    if encode is not None:
        encode()
        if not torch.equal(outs[0], p) or not torch.equal(outs[1], q):
            raise AssertionError("ISA-L: other parities came out")
        calls["P+Q by ISA-L alone"] = encode
    case = f"{data} data members, {whole.nbytes >> 20} MiB"
    seconds_by_name = _timed(report, case, calls, whole.nbytes, rounds)
    figures["xor_vs_memcpy"].append(ratio(seconds_by_name["memcpy"], seconds_by_name["XOR"]))
    figures["pq_vs_memcpy"].append(ratio(seconds_by_name["memcpy"], seconds_by_name["P+Q"]))


def _against_pyeclib(
    report: Report, figures: dict[str, list[Spread]], stripes: _Stripes, rounds: int
) -> None:
    from pyeclib.ec_iface import ECDriver

    data, size = len(stripes.members), stripes.members[0].nbytes
    content = stripes.whole.numpy().tobytes()
    expected = [parity.numpy().tobytes() for parity in erasure.encode(stripes.members, 2)]
    calls: dict[str, Callable[[], object]] = {}
    for parity, name in ((1, "XOR"), (2, "P+Q")):
        driver = ECDriver(k=data, m=parity, ec_type="isa_l_rs_vand")
        their_parity = [fragment[-size:] for fragment in driver.encode(content)[data:]]
        if their_parity != expected[:parity]:
            raise AssertionError(f"pyeclib, {parity} parities: other parities came out")
        encode = partial(erasure.encode, stripes.members, parity, stripes.outs[:parity])
        calls[name] = partial(_repeat, encode)
        calls[f"{name} by pyeclib"] = partial(_repeat, partial(driver.encode, content))
    case = f"{data} data members, {len(content) >> 20} MiB"
    seconds_by_name = _timed(report, case, calls, _REPEATS * len(content), rounds)
    for name in ("XOR", "P+Q"):
        figures["vs_pyeclib"].append(
            ratio(seconds_by_name[f"{name} by pyeclib"], seconds_by_name[name])
        )


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_REPEATS):
        call()


def _isa_l(stripes: _Stripes) -> Callable[[], object] | None:
    """ISA-L's encoder of P and Q on the members where they lie; None if no wheel here has it."""
    spec = importlib.util.find_spec("pyeclib")
    origin = None if spec is None else spec.origin
    libraries = (
        [] if origin is None else sorted(Path(origin).parents[1].glob("pyeclib.libs/libisal*"))
    )
    if not libraries:
        return None
    library = ctypes.CDLL(str(libraries[0]))
    data, parity = len(stripes.members), len(stripes.outs)
    factors = [
        erasure.parity_coefficients(data, data + k)[m] for k in range(2) for m in range(data)
    ]
    matrix = (ctypes.c_ubyte * len(factors))(*factors)
    tables = (ctypes.c_ubyte * (32 * len(factors)))()
    library.ec_init_tables(data, parity, matrix, tables)
    sources: Any = (ctypes.c_void_p * data)(*(m.data_ptr() for m in stripes.members))
    outs: Any = (ctypes.c_void_p * parity)(*(out.data_ptr() for out in stripes.outs))
    length = stripes.members[0].nbytes
    return partial(library.ec_encode_data, length, data, parity, tables, sources, outs)


if __name__ == "__main__":
    alone = Report(name="erasure_kernels", columns=("what",))
    with watch() as watched:
        measure(alone, smoke=False)
    print_report(alone, smoke=False, busy=watched.busy)
