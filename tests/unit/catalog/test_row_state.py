"""Row states in half their bytes: what the bound of format §3.5 promises."""

from __future__ import annotations

import torch

from recpoint.format.row_state import to_bfloat16

INF, NAN = float("inf"), float("nan")


def every_magnitude() -> torch.Tensor:
    """Positive finite f32 of every exponent: three from each, one just above a tie."""
    exponents = torch.arange(255, dtype=torch.int32) << 23
    fractions = torch.tensor([0, 0x8000, 0x8001, 0x18000, 0x7FFFFF, 0x2A5A5A], dtype=torch.int32)
    return (exponents[:, None] | fractions).view(torch.float32).flatten()


def test_each_value_is_within_its_bound_and_keeps_its_sign() -> None:
    for values in (every_magnitude(), -every_magnitude()):
        found = to_bfloat16(values).double()
        bound = torch.maximum(values.double().abs() * 2.0**-8, torch.tensor(2.0**-134))
        assert found.isfinite().all()
        assert ((found - values.double()).abs() <= bound).all()
        assert torch.equal(found.signbit(), values.signbit())


def test_greater_values_stay_as_great() -> None:
    values = every_magnitude().sort().values
    found = to_bfloat16(values).float()
    assert (found[1:] >= found[:-1]).all()


def test_zeros_infinities_nan_and_what_is_bfloat16_already_stay() -> None:
    values = torch.tensor([0.0, -0.0, INF, -INF, 1.5, -3.0, 2.0**-133])
    found = to_bfloat16(values).float()
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))
    assert to_bfloat16(torch.tensor([NAN])).isnan().all()


def test_ties_go_to_the_even_one_and_shapes_stay() -> None:
    values = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8]])
    assert to_bfloat16(values).tolist() == [[1.0, 1 + 2.0**-6]]
