"""What restores at a price return, and what the benchmark makes of its measurements."""

from __future__ import annotations

import pytest
import torch

from benchmarks.coded_chain import Rule, TableCopy, chain_rows, stored_bits, value_bits
from benchmarks.learning import Score
from benchmarks.price_accuracy import report_of
from benchmarks.priced_models import RULE_NAMES, EndOutcome, PriceOutcome, RulePoint
from recpoint.kernels.allocation import row_bits

LOSS = Score(0.5, 0.7)


def point(*, stored_mb: float, rms: float, loss: float) -> RulePoint:
    return RulePoint(Rule(price=0.5), 2.5, 3.0, stored_mb, rms, Score(loss, 0.0))


def model(seed: int, *, loss: float, curve: bool = True) -> PriceOutcome:
    """At its price, 2.83 MB: between the 2 MB of 2 bits and the 4 MB of 3 bits."""
    points = [point(stored_mb=8**0.5, rms=0.01, loss=loss)]
    points += [point(stored_mb=1.0, rms=0.1, loss=0.0) for _ in RULE_NAMES[1:]]
    for name, stored_mb, rms in (
        ("2 bits", 2.0, 0.2), ("3 bits", 4.0, 0.05), ("4 bits", 6.0, 0.02), ("8 bits", 9.0, 0.001)
    ):  # fmt: skip
        points[RULE_NAMES.index(name)] = point(stored_mb=stored_mb, rms=rms, loss=0.0)
    return PriceOutcome("t", "Adagrad", seed, LOSS, 0.4, 9e-5, points if curve else points[:2])


def test_losses_are_means_over_seeds_with_their_interval() -> None:
    models = [model(seed, loss=loss) for seed, loss in enumerate((0.01, 0.02, 0.06))]
    ends = [EndOutcome("t", "Adagrad", seed, 20, Score(seed, 0.0)) for seed in range(3)]
    ends += [EndOutcome("t", "Adagrad", seed, 0, Score(90.0, 0.0)) for seed in range(3)]
    figures = report_of(models, ends).figures
    assert figures["loss_increase"] == pytest.approx(3e-4)
    half = 4.303 * torch.tensor([0.01, 0.02, 0.06]).std().item() / 3**0.5
    assert figures["loss_increase_ci95_high"] == pytest.approx(3e-4 + half / 100)
    assert figures["loss_increase_worst_model"] == pytest.approx(6e-4)
    assert figures["loss_increase_at_end"] == pytest.approx(0.01)


def test_the_change_of_logits_is_compared_at_as_many_bytes() -> None:
    models = [model(0, loss=0.0), *(model(seed, loss=0.0, curve=False) for seed in (1, 2))]
    assert report_of(models, []).figures["rms_vs_uniform"] == pytest.approx(0.01 / 0.1)


def test_what_was_not_measured_has_no_figure() -> None:
    report = report_of([model(0, loss=0.01, curve=False)], [])
    assert report.figures.keys() == {"loss_increase", "loss_increase_worst_model"}
    assert report.not_run.keys() > {"rms_vs_uniform", "loss_increase_at_end"}


@pytest.mark.parametrize("residual", [False, True])
def test_a_chain_returns_rows_of_the_increment_and_of_the_full(residual: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    full = TableCopy(torch.randn(50, 8, generator=generator), torch.ones(50))
    changed, wanted = torch.tensor([3, 7, 20]), torch.tensor([0, 7, 20, 41])
    newest = TableCopy(full.rows.clone(), torch.ones(50))
    newest.rows[changed] += 0.01 * torch.randn(3, 8, generator=generator)
    newest.rows[20] = 1.5  # constant: a residual of it is stored exactly
    chain = chain_rows(full, newest, changed, wanted, Rule(bits=8, residual=residual), seed=1)
    step = (full.rows.amax(dim=1) - full.rows.amin(dim=1)) / 255
    errors = (chain.values - newest.rows[wanted]).abs().amax(dim=1)
    assert bool((errors[[0, 3]] <= 0.51 * step[[0, 41]]).all())
    assert errors[1] <= (0.1 if residual else 0.51) * step[7]
    assert errors[2] == 0
    assert value_bits(chain.full_forms) == 8
    exact = int(residual)
    assert stored_bits(chain.increment_forms, 8) == 8 * 32 * exact + (3 - exact) * row_bits(
        8, 8, wide=False
    )


def test_a_price_gives_important_rows_more_bits() -> None:
    rows = torch.randn(6000, 16, generator=torch.Generator().manual_seed(0))
    importance = torch.cat([torch.zeros(3000), torch.full((3000,), 1e-3)])
    copy, nothing = TableCopy(rows, importance), torch.arange(0)
    chain = chain_rows(copy, copy, nothing, nothing, Rule(price=1e-5), seed=1)
    assert value_bits(chain.full_forms[:3000]) == 2
    assert value_bits(chain.full_forms[3000:]) >= 4
