"""What the benchmark makes of its measurements: which seeds and tasks count for which figure."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import RULE, WIDTHS, Immediate, Outcome, Spread, report_of
from benchmarks.learning import Score


def _outcome(task: str, seed: int, *, at_once: float, at_end: float, paired: bool) -> Outcome:
    return Outcome(
        task=task,
        seed=seed,
        paired=paired,
        never=Score(0.5, 0.7),
        immediate=[Immediate("auto", bits, Score(0.01, 0.02)) for bits in WIDTHS],
        spread=[
            Spread(restores, bits, Score(at_once, -at_once), Score(at_end + seed, 0.0))
            for restores, bits in RULE.items()
        ],
    )


def _outcomes() -> list[Outcome]:
    """Two tasks of three seeds: the worst at once is the last seed of the first task."""
    at_once = [0.01, 0.02, 0.7]
    return [
        _outcome("unpaired", seed, at_once=at_once[seed], at_end=50.0, paired=False)
        for seed in range(3)
    ] + [_outcome("paired", seed, at_once=0.005, at_end=2.0, paired=True) for seed in range(3)]


def test_the_rule_is_judged_by_the_worst_seed() -> None:
    assert report_of(_outcomes()).figures["relative_loss_at_rule"] == 0.7


def test_a_fall_of_the_auc_counts_as_a_rise_of_the_loss() -> None:
    worse = _outcome("unpaired", 3, at_once=-0.9, at_end=0.0, paired=False)
    assert report_of([*_outcomes(), worse]).figures["relative_loss_at_rule"] == 0.9


def test_every_seed_of_every_task_has_its_row() -> None:
    rows = {str(row[0]): row[1:] for row in report_of(_outcomes()).rows}
    for outcome in _outcomes():
        cell = f"{outcome.spread[0].at_once.loss:+.4f} / {outcome.spread[0].at_once.auc:+.4f}"
        found = rows[f"{outcome.task}, seed {outcome.seed}"]
        assert found == (cell,) * len(WIDTHS)


def test_ends_are_compared_on_the_paired_task_alone() -> None:
    figures = report_of(_outcomes()).figures
    assert figures["paired_mean"] == pytest.approx(3.0)  # of 2, 3 and 4
    assert figures["paired_ci95"] == pytest.approx(4.303 / 3**0.5)
