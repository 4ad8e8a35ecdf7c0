"""The number by which ranks find that what one of them stores is not what all of them have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recpoint.trainer_plugin.ranks.agreement import (
    NOTHING,
    Replicas,
    Sketch,
    are_alike,
    drift_between,
)
from recpoint.trainer_plugin.ranks.ranks import Ranks


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "table": torch.randn(50_000, 16, generator=generator),
        "norm": torch.ones(512),
        "zeros": torch.zeros(7, 3),
        "half": torch.randn(40, 30, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor([3]),  # of integers
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(0.5),
        "top": 0.01 * torch.randn(64, generator=generator),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.5, -2.0]), (3, 10**9)
        ),
    }


def sketch(found: dict[str, Tensor]) -> Sketch:
    return Replicas(Ranks(), lambda: found, {}, {}).sketch()


def drifted(found: dict[str, Tensor]) -> None:
    noise = torch.randn(found["table"].shape, generator=torch.Generator().manual_seed(2))
    found["table"] *= 1 + 1e-5 * noise


def small_one(found: dict[str, Tensor]) -> None:
    found["top"] = 0.01 * torch.randn(64, generator=torch.Generator().manual_seed(3))


def changed_places(found: dict[str, Tensor]) -> None:
    found["table"] = found["table"].flip(0)


def scaled(found: dict[str, Tensor]) -> None:
    found["norm"] *= 3


def other_scalar(found: dict[str, Tensor]) -> None:
    found["scalar"] += 0.01


def no_longer_zero(found: dict[str, Tensor]) -> None:
    found["zeros"][0, 0] = 1e-3


def other_sparse_value(found: dict[str, Tensor]) -> None:
    found["sparse"] = found["sparse"] * 2


def diverged(found: dict[str, Tensor]) -> None:
    found["norm"][0] = torch.nan


@pytest.mark.parametrize(
    ("change", "like"),
    [
        (drifted, True),
        (small_one, False),
        (changed_places, False),
        (scaled, False),
        (other_scalar, False),
        (no_longer_zero, False),
        (other_sparse_value, False),
        (diverged, False),
    ],
)
def test_what_differs_by_more_than_rounding_is_not_alike(
    change: Callable[[dict[str, Tensor]], None], like: bool
) -> None:
    here, there = tensors(), tensors()
    assert sketch(here).is_like(sketch(there)) and sketch(here) != NOTHING
    change(there)
    assert sketch(here).is_like(sketch(there)) is like
    assert sketch(there).is_like(sketch({name: one.clone() for name, one in there.items()}))


def test_a_drift_that_has_begun_is_told() -> None:
    same, drifts = tensors(), tensors()
    assert drift_between([sketch(tensors()), sketch(same)]) is None
    drifts["norm"][0] = torch.nextafter(drifts["norm"][0], torch.tensor(torch.inf))
    told = drift_between([sketch(same), sketch(same), sketch(drifts)])
    assert told is not None and are_alike([sketch(same), sketch(drifts)])
    assert "values on rank 2 that differ slightly from those on rank 0" in told
    assert "recpoint.embeddings.clip_grad_norm_()" in told


def test_its_integers_bring_it_back() -> None:
    for one in (NOTHING, Sketch(-0.1, 0.3), sketch(tensors())):
        assert Sketch.of_integers(*one.integers) == one
        assert all(-(2**63) <= integer < 2**63 for integer in one.integers)


def test_what_meshes_have_twice_has_to_add_to_nothing() -> None:
    assert are_alike([Sketch(1.0, -4.0), Sketch(1.0, 2.0), Sketch(1.0, 2.0)])
    assert not are_alike([Sketch(1.0, -4.0), Sketch(1.0, 2.0), Sketch(1.0, 2.001)])
    assert not are_alike([Sketch(1.0), Sketch(1.001)])
