"""What is told about kernels is what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint import kernels
from recpoint.kernels import native
from recpoint.kernels.implementation import KERNELS, implementations, on_cpu


def test_every_kernel_is_told_of_once_for_each_device() -> None:
    folders = {path.parent.name for path in Path(kernels.__file__).parent.glob("*/reference.py")}
    assert set(KERNELS) == folders
    told = [(found.kernel, found.device) for found in implementations()]
    assert sorted(told) == sorted((kernel, d) for kernel in KERNELS for d in ("cpu", "cuda"))


def test_what_runs_on_this_cpu() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert on_cpu() == f"native, 1 thread, {native.instruction_set()}"
        torch.set_num_threads(3)
        assert ", 3 threads, " in on_cpu()
        told = next(found for found in implementations() if found.device == "cpu")
        assert (told.name, told.why) == ("native", f"{on_cpu()}, compiled by {native.COMPILER}")
    finally:
        torch.set_num_threads(threads)


def test_what_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    version = pytest.importorskip("triton").__version__
    assert _on_cuda() == {("triton", f"triton {version}, NVIDIA X")}
    monkeypatch.setattr("recpoint.kernels.implementation.find_spec", lambda name: None)
    assert _on_cuda() == {(None, "triton is not installed")}


def _on_cuda() -> set[tuple[str | None, str]]:
    """What is told of kernels that have a version for a GPU."""
    found = [found for found in implementations() if found.device == "cuda"]
    on_cpu_only = (
        "allocation",
        "copy_ahead",
        "dirty_rows",
        "erasure",
        "first_values",
        "key_map",
        "key_order",
        "key_sketch",
        "lookup_counts",
        "moments",
        "residuals",
        "row_blocks",
        "row_digest",
        "row_map",
        "row_set",
        "slot_map",
    )
    told = {kernel.kernel: kernel for kernel in found}
    assert all(told[kernel].name is None for kernel in on_cpu_only)
    assert "dirty_bitmap and row_gather" in told["dirty_rows"].why
    assert "host memory" in told["row_digest"].why
    assert "read ahead" in told["slot_map"].why
    return {(kernel.name, kernel.why) for kernel in found if kernel.kernel not in on_cpu_only}
