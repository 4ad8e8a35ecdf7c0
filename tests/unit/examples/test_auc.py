"""The AUC of the examples against its definition, pair by pair."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from auc import PrequentialAUC, auc

SAMPLES = st.lists(
    st.tuples(st.integers(-3000, 3000).map(lambda n: n / 1024), st.booleans()), max_size=60
)


def by_pairs(samples: list[tuple[float, bool]]) -> float:
    positives = [score for score, label in samples if label]
    negatives = [score for score, label in samples if not label]
    if not positives or not negatives:
        return math.nan
    won = sum((p > n) + (p == n) / 2 for p, n in itertools.product(positives, negatives))
    return won / (len(positives) * len(negatives))


def columns(samples: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.tensor([score for score, _ in samples], dtype=torch.float32)
    return scores, torch.tensor([float(label) for _, label in samples])


@given(SAMPLES)
def test_auc_is_the_share_of_won_pairs(samples: list[tuple[float, bool]]) -> None:
    found, expected = auc(*columns(samples)), by_pairs(samples)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@given(st.lists(SAMPLES, max_size=4))
def test_prequential_auc_is_exact_for_logits_on_its_grid(
    batches: list[list[tuple[float, bool]]],
) -> None:
    meter = PrequentialAUC(tail_from_batch=2)
    for number, samples in enumerate(batches):
        meter.add(number, *columns(samples))
    for found, counted in ((meter.whole, batches), (meter.tail, batches[2:])):
        expected = by_pairs([sample for samples in counted for sample in samples])
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_prequential_auc_takes_every_logit_and_is_close_off_its_grid() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = (torch.rand(20_000, generator=generator) < 0.3).float()
    logits = torch.randn(20_000, generator=generator) * 3 + labels
    logits[:2] = torch.tensor([1e30, -1e30])
    meter = PrequentialAUC(tail_from_batch=None)
    meter.add(0, logits, labels)
    assert abs(meter.whole - auc(logits, labels)) < 2e-4
    assert math.isnan(meter.tail)


def test_prequential_auc_goes_on_from_its_state() -> None:
    generator = torch.Generator().manual_seed(2)
    whole, first, second = (PrequentialAUC(tail_from_batch=3) for _ in range(3))
    for number in range(6):
        logits = torch.randn(50, generator=generator)
        labels = torch.randint(0, 2, (50,), generator=generator).float()
        whole.add(number, logits, labels)
        (first if number < 4 else second).add(number, logits, labels)
        if number == 3:
            second.load_state_dict(first.state_dict())
    assert (second.whole, second.tail) == (whole.whole, whole.tail)
