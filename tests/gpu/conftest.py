"""Where the Triton kernels run: on a GPU, or in Triton's interpreter with tensors on the CPU.

`tests/unit/kernels/test_triton_interpreter.py` runs this folder with TRITON_INTERPRET=1, which
has to be set before triton is imported, so in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("no CUDA device")
