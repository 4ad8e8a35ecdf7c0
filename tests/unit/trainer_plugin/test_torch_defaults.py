"""What a script sets as torch's defaults is for its own tensors, and nothing of a checkpoint's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.training_builder import Place, checkpointer, everything, simple_training

_ROOT = Path(__file__).parents[3]
_FOLDERS = ("kernels", "format", "catalog", "trainer_plugin", "serving", "tasks", "flows")
#: They take the default device where they are not told one; of these, the first take the default
#: dtype too.
_OF_NO_DTYPE = {"empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn"}
_OF_NO_DTYPE |= {"zeros"}
_MAKE = _OF_NO_DTYPE | {"arange", "as_tensor", "asarray", "randint", "randperm", "scalar_tensor"}
_MAKE |= {"sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor"}


def _careless(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if ast.unparse(node.func.value) != "torch" or name not in _MAKE:
            continue
        told = {keyword.arg for keyword in node.keywords}
        if "device" not in told or (name in _OF_NO_DTYPE and "dtype" not in told):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", _FOLDERS)
def test_each_tensor_is_made_with_a_device_and_a_dtype(folder: str) -> None:
    found = [
        f"{path.relative_to(_ROOT)} {call}"
        for path in sorted((_ROOT / folder).rglob("*.py"))
        for call in _careless(path.read_text())
    ]
    assert found == []


@contextmanager
def _defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("bits", ["lossless", 4])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("meta", torch.float32), ("cpu", torch.float64), ("meta", torch.bfloat16)],
)
def test_a_run_goes_on_whatever_the_defaults_are(
    place: Place, device: str, dtype: torch.dtype, bits: object
) -> None:
    def run(seed: int, batches: int) -> list[object]:
        training = simple_training(seed)
        model = training.model
        model.users.sparse = True
        adagrad = torch.optim.Adagrad(model.items.parameters(), lr=0.1)
        rest = [*model.users.parameters(), *model.norm.parameters(), *model.top.parameters()]
        training.optimizers = [adagrad, torch.optim.SGD(rest, lr=0.1)]
        with place.agent():
            with _defaults(device, dtype):
                ckpt = checkpointer(training, place, bits=bits, when_busy="wait")
                ckpt.restore()
            while ckpt.batches_done < batches:
                training.batch()
                with _defaults(device, dtype):
                    ckpt.step()
            with _defaults(device, dtype):
                ckpt.close()
        assert (ckpt.stats.failed, ckpt.stats.committed) == (0, batches // 2 if seed == 1 else 0)
        return everything(training)

    done = run(1, 6)
    if bits == "lossless":
        assert run(2, 6) == done
