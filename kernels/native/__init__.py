"""Gives access to the C++ functions, in the version for the processor's widest instruction set.

`module.cpp` has a table of functions for each instruction set. `library` has the functions of the
set that is used. The environment variable RECPOINT_INSTRUCTION_SET selects another set. All
versions give the same bytes.

The functions take addresses and counts as plain integers. They cannot check dtypes, contiguity and
bounds, so the caller must have checked these.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from recpoint.kernels.native.sources import digest

try:
    _native: Any = importlib.import_module("recpoint.kernels.native._native")
except ImportError as error:
    raise ImportError(
        f"recpoint's kernels are not compiled, or not for this system: {error}. Next: in a"
        " checkout, make install, or pip install -e ."
    ) from error

__all__ = [
    "COMPILER",
    "INSTRUCTION_SETS",
    "instruction_set",
    "library",
    "team_size",
    "use",
]

#: The instruction sets of this processor, widest first.
INSTRUCTION_SETS: Final = tuple(_native.instruction_sets)

#: The compiler that compiled the kernels.
COMPILER: Final = str(_native.compiler)

#: Below this many bytes of traffic, handing a part to another thread costs more than it saves.
SPLIT_BYTES: Final = 1 << 20

#: The functions of the instruction set that is used, by their names in the `native.cpp` files.
library: Any = SimpleNamespace()


def _use(name: str) -> None:
    if name not in INSTRUCTION_SETS:
        raise ValueError(
            f"RECPOINT_INSTRUCTION_SET: {name!r}, expected one of {', '.join(INSTRUCTION_SETS)}"
        )
    library.__dict__.update(_native.instruction_sets[name], instruction_set=name)


def instruction_set() -> str:
    """The instruction set that is used."""
    return str(library.instruction_set)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Use another instruction set for a while. A marker that was made before keeps its own set.

    Raises:
        ValueError: this processor does not have the set.
    """
    previous_set = instruction_set()
    _use(name)
    try:
        yield
    finally:
        _use(previous_set)


def team_size(traffic_bytes: int) -> int:
    """The number of threads, 1 or more, that pay for work that reads and writes so many bytes."""
    return max(1, min(torch.get_num_threads(), traffic_bytes // SPLIT_BYTES + 1))


def _refuse_stale(kernels: Path) -> None:
    current_digest = digest(kernels)
    if current_digest is not None and current_digest != _native.sources:
        raise ImportError(
            "recpoint's kernels are older than their C++ sources in"
            f" {kernels}. Next: make install, or pip install -e ."
        )


_refuse_stale(Path(__file__).parent.parent)
_use(os.environ.get("RECPOINT_INSTRUCTION_SET") or INSTRUCTION_SETS[0])
