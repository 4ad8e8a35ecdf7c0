"""Imports the Triton kernels and their references with nothing but torch, Triton and numpy.

The kernels' packages import the native versions, which a machine without a compiler cannot build.
Without these, empty packages are put in their place, in which the modules are found as usual.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

__all__ = ["OPERATIONS", "Kernels", "load"]

OPERATIONS = ("bit_packing", "dirty_bitmap", "quantize", "row_gather")
_SOURCE = Path(__file__).resolve().parents[1] / "src"


class Kernels(NamedTuple):
    """One operation: `reference` gives the right results, `triton` runs on the GPU."""

    reference: ModuleType
    triton: ModuleType


def load() -> dict[str, Kernels]:
    """Import both versions of each of `OPERATIONS`."""
    if str(_SOURCE) not in sys.path:
        sys.path.insert(0, str(_SOURCE))  # a checkout that is not installed
    try:
        importlib.import_module("recpoint.kernels")
    except ImportError:
        _enter_packages()
    return {
        name: Kernels(
            importlib.import_module(f"recpoint.kernels.{name}.reference"),
            importlib.import_module(f"recpoint.kernels.{name}.triton"),
        )
        for name in OPERATIONS
    }


def _enter_packages() -> None:
    folder = _SOURCE / "recpoint" / "kernels"
    paths = {"recpoint.kernels": folder}
    paths |= {f"recpoint.kernels.{name}": folder / name for name in OPERATIONS}
    for name in [module for module in sys.modules if module.startswith("recpoint.kernels")]:
        del sys.modules[name]  # left behind by the failed import
    for name, path in paths.items():
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
