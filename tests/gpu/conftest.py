"""Where the Triton kernels run: on a GPU, or in Triton's interpreter with tensors on the CPU.

`tests/unit/kernels/test_triton_interpreter.py` runs this folder with TRITON_INTERPRET=1, which
has to be set before triton is imported, so in a process of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("no CUDA device")


Huge = Callable[[int, torch.dtype], torch.Tensor]


@pytest.fixture
def huge(device: torch.device, tmp_path: Path) -> Huge:
    """A vector of very many elements whose values nobody has set.

    On a CPU it is a sparse file, of which only what is touched takes room.
    """
    numbers = itertools.count()

    def vector(count: int, dtype: torch.dtype) -> torch.Tensor:
        if device.type == "cuda":
            return torch.empty(count, dtype=dtype, device=device)
        path = tmp_path / f"huge-{next(numbers)}"
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype)

    return vector
