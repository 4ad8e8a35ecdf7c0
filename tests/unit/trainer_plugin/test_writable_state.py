"""State that a checkpoint holds can be written back, or is refused when the Checkpointer is built.

torch refuses to write into a tensor whose elements share memory; a write into read-only memory
ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recpoint import Checkpointer, Options, Staging, Timeouts
from recpoint.errors import IncompatibleModel, SettingsError
from tests.training_builder import Place

Make = Callable[[float], Tensor]


class Model(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.register_buffer("held", buffer)


def _checkpointer(place: Place, model: nn.Module, **given: object) -> Checkpointer:
    return Checkpointer(
        model,
        [torch.optim.SGD(model.parameters(), lr=0.1)],
        run=place.run,
        staging=Staging(directory=place.staging),
        interval_batches=1,
        timeouts=Timeouts(close_seconds=60.0),
        options=Options(handle_sigterm=False, announce=False),
        **given,  # type: ignore[arg-type]
    )


def _store(place: Place, buffer: Tensor) -> None:
    model = Model(buffer)
    with place.agent(), _checkpointer(place, model) as checkpoints:
        checkpoints.restore()
        model.table(torch.tensor([1])).sum().backward()
        checkpoints.step()


def _expanded(value: float) -> Tensor:
    return torch.tensor([[value, -0.0, 2 * value]]).expand(4, 3)


def _windows(value: float) -> Tensor:
    return (torch.arange(6.0) + value).unfold(0, 3, 1)


def _one_value(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).expand(2, 5)


def _channels_last(value: float) -> Tensor:
    return (torch.rand(2, 3, 4, 5) + value).to(memory_format=torch.channels_last)


def _every_second(value: float) -> Tensor:
    return (torch.arange(12.0) + value).reshape(3, 4)[:, ::2].t()


def _negated(value: float) -> Tensor:
    lazily_negated = torch.complex(torch.zeros(3), torch.arange(3.0) + value).conj().imag
    assert lazily_negated.is_neg()
    return lazily_negated


def _mapped(value: float, directory: Path) -> Tensor:
    """Return a private mapping of a file, which can be written."""
    values = np.arange(6, dtype=np.float32) + value
    np.save(directory / f"{value}.npy", values)
    return torch.from_numpy(np.load(directory / f"{value}.npy", mmap_mode="c"))


@pytest.mark.parametrize(
    "make", [_expanded, _windows, _one_value, _channels_last, _every_second, _negated]
)
def test_tensors_of_unusual_memory_are_restored(place: Place, make: Make) -> None:
    trained, built = make(3.0), make(7.0)
    assert not torch.equal(trained, built)
    _store(place, trained)
    model = Model(built)
    strides = built.stride()
    with _checkpointer(place, model) as checkpoints:
        assert checkpoints.restore() is not None
    held = model.get_buffer("held")
    assert held is built and held.stride() == strides
    assert held.equal(trained)
    # Signs of zeros too.
    assert torch.signbit(held).equal(torch.signbit(trained))


def test_a_private_mapping_of_a_file_is_restored(place: Place, tmp_path: Path) -> None:
    trained, built = _mapped(3.0, tmp_path), _mapped(7.0, tmp_path)
    _store(place, trained)
    model = Model(built)
    with _checkpointer(place, model) as checkpoints:
        assert checkpoints.restore() is not None
    assert model.get_buffer("held").equal(trained)


@pytest.mark.parametrize("partial", [None, {"dense": ["held"]}], ids=["all", "part"])
def test_values_that_shared_memory_cannot_hold_are_refused(
    place: Place, partial: dict[str, list[str]] | None
) -> None:
    _store(place, torch.arange(12.0).reshape(4, 3))
    model = Model(_expanded(7.0))
    before = model.get_buffer("held").clone()
    with (
        _checkpointer(place, model) as checkpoints,
        pytest.raises(IncompatibleModel, match="'held' has elements that share memory"),
    ):
        checkpoints.restore(partial=partial)
    assert model.get_buffer("held").equal(before)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def _read_only(directory: Path) -> Tensor:
    np.save(directory / "fixed.npy", np.arange(6, dtype=np.float32))
    return torch.from_numpy(np.load(directory / "fixed.npy", mmap_mode="r"))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (_read_only, "read-only memory"),
        (lambda _: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda _: torch.ones(3, dtype=torch.complex64).conj(), "torch.complex64"),
        (lambda _: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "torch.quint8"),
        (lambda _: torch.eye(3).to_sparse_csr(), "sparse_csr|Sparse CSR"),
        (lambda _: torch.ones(3, device="meta"), "meta"),
        (lambda _: nn.parameter.UninitializedBuffer(), "without a shape"),
        (lambda _: nn.Parameter(torch.ones(2, 3)).clone().unbind()[0], "one of several views"),
    ],
    ids=["read-only", "nested", "conjugate", "quantized", "csr", "meta", "lazy", "unbound"],
)
def test_what_could_not_be_restored_is_refused_at_the_build(
    place: Place, tmp_path: Path, make: Callable[[Path], Tensor], fault: str
) -> None:
    with pytest.raises(SettingsError, match=fault) as refused:
        _checkpointer(place, Model(make(tmp_path)))
    assert "held" in refused.value.subject


class Averages(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", buffer)


def test_shared_memory_in_a_module_among_the_extras(place: Place) -> None:
    model = Model(torch.ones(2))
    with pytest.raises(SettingsError, match=r"extras\['ema'\], 'mean'.*share memory"):
        _checkpointer(place, model, extras={"ema": Averages(_expanded(1.0))})
    _checkpointer(place, model, extras={"ema": Averages(torch.ones(2))}).close()


def test_a_learning_rate_of_another_shape_or_memory(place: Place) -> None:
    """A group's tensor is written in place where it can be, and replaced otherwise."""
    rates = torch.tensor([0.1, 0.2])
    for given, stored in (
        (torch.tensor(0.5).expand(2), rates),
        (torch.tensor(0.5), rates),
        (torch.zeros(2), rates),
    ):
        model = Model(torch.ones(2))
        checkpoints = _checkpointer(place, model)
        optimizer = checkpoints._parts.state.optimizers.optimizers[0]
        optimizer.param_groups[0]["rates"] = stored
        saved = checkpoints._parts.state.optimizers.capture()
        optimizer.param_groups[0]["rates"] = given
        checkpoints._parts.state.optimizers.restore(saved, {})
        assert optimizer.param_groups[0]["rates"].equal(rates)
        checkpoints.close()
