"""TorchRec's optimizers around others: warm-ups, clipped gradients, and schedulers of torch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from recpoint.errors import IncompatibleModel, SettingsError
from tests.torchrec_model import MISSING
from tests.torchrec_ranks import play
from tests.training_builder import Place, Training, checkpointer, simple_training, train
from tests.unit.trainer_plugin.test_torchrec import same

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.xdist_group("torchrec"),
]

KINDS = ("warm-up", "scheduler")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """(kind, life) -> what each rank returned."""
    folder = tmp_path_factory.mktemp("warmed")
    plays = {}
    for kind in KINDS:
        for life in ("whole", "killed", "restored"):
            run = f"{kind}-{'whole' if life == 'whole' else 'cut'}"
            plays[kind, life] = {
                "play": "under_warm_up", "ranks": 2, "kind": kind, "steps": 9,
                "run": str(folder / run), "staging": str(folder / f"of-{run}"),
            } | ({"die_at": 5} if life == "killed" else {})  # fmt: skip
    return dict(zip(plays, play(list(plays.values()), folder), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_inside_a_warm_up_ends_as_an_uninterrupted_one(
    played: dict[tuple[str, str], list[Any]], kind: str
) -> None:
    assert played[kind, "killed"] == [None, None]
    for expected, restored in zip(played[kind, "whole"], played[kind, "restored"], strict=True):
        assert (expected["restored"], restored["restored"]) == (None, 4)
        # Rates of the fused tables and of the dense part, which differ at each step.
        assert restored["rates"] == expected["rates"][4:]
        assert len({tuple(rates) for rates in expected["rates"]}) == len(expected["rates"])
        for part in ("tables", "fused", "dense", "optimizer"):
            assert same(restored[part], expected[part]), part
        assert restored["positions"] == expected["positions"]


def warming(stages: int = 2, *, wrapper: str = "WarmupOptimizer") -> Training:
    """Return a training whose one optimizer is a wrapper of TorchRec around SGD.

    No table is sharded.
    """
    from torchrec.optim.clipping import GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    training = simple_training()
    optimizer: Any = KeyedOptimizerWrapper(
        dict(training.model.named_parameters()), lambda given: torch.optim.SGD(given, lr=0.1)
    )
    optimizer = GradientClippingOptimizer(optimizer)
    if wrapper == "WarmupOptimizer":
        policies = [WarmupPolicy.LINEAR, WarmupPolicy.POLY][:stages]
        optimizer = WarmupOptimizer(
            optimizer,
            [
                WarmupStage(policy=policy, max_iters=3 + 20 * number, value=0.2)
                for number, policy in enumerate(policies)
            ],
            lr=0.3,
        )
    training.optimizers = [CombinedOptimizer([optimizer])]
    return training


def rates_and_weights(training: Training) -> list[Any]:
    rates = [group["lr"] for group in training.optimizers[0].param_groups]
    return rates + [parameter.tolist() for parameter in training.model.parameters()]


def test_a_warm_up_goes_on_without_sharded_tables(place: Place) -> None:
    with place.agent():
        first = warming()
        with checkpointer(first, place) as ckpt:
            ckpt.restore()
            train(first, ckpt, 6)
        at_the_cut = rates_and_weights(first)
        first.batch()
        again = warming()
        again.optimizers[0].param_groups[0]["lr"] = 7.0
        with checkpointer(again, place) as ckpt:
            report = ckpt.restore()
            assert report is not None and report.restored.step == 6
            assert rates_and_weights(again) == at_the_cut
            train(again, ckpt, 1)
            ckpt.close(final=False)
        assert rates_and_weights(again) == rates_and_weights(first) != at_the_cut


def test_a_warm_up_that_does_not_fit_is_refused_by_name(place: Place) -> None:
    with place.agent():
        first = warming()
        with checkpointer(first, place) as ckpt:
            ckpt.restore()
            train(first, ckpt, 6)
        none = warming(wrapper="none")
        with (
            checkpointer(none, place) as ckpt,
            pytest.raises(IncompatibleModel, match="0 schedulers here, 1 in the checkpoint"),
        ):
            ckpt.restore()
        # As many, but of another kind: torch would take the position of a warm-up for its own.
        none.schedulers = [torch.optim.lr_scheduler.StepLR(none.optimizers[0], 2)]
        with (
            checkpointer(none, place) as ckpt,
            pytest.raises(IncompatibleModel, match=r"stands where schedulers\[0\] is here"),
        ):
            ckpt.restore()
        short = warming(stages=1)
        short.optimizers[0].optimizers[0][1]._stages.pop()  # type: ignore[attr-defined]
        with (
            checkpointer(short, place) as ckpt,
            pytest.raises(IncompatibleModel, match="in stage 1 of a WarmupOptimizer, which has on"),
        ):
            ckpt.restore()


def test_a_scheduler_of_a_combined_optimizer_counts_as_given(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = warming(wrapper="none")
    training.schedulers = [torch.optim.lr_scheduler.StepLR(training.optimizers[0], 2)]
    with caplog.at_level(logging.WARNING, "recpoint"), checkpointer(training, place) as ckpt:
        ckpt.restore()
        ckpt.close(final=False)
    assert "learning-rate scheduler" not in caplog.text
    given, training.schedulers = training.schedulers, []
    with caplog.at_level(logging.WARNING, "recpoint"), checkpointer(training, place) as ckpt:
        ckpt.restore()
        ckpt.close(final=False)
    assert "has a learning-rate scheduler that is not in its checkpoints" in caplog.text
    del given


def test_an_own_wrapper_is_refused_because_it_may_have_state(place: Place) -> None:
    from torchrec.optim.warmup import WarmupOptimizer

    class OwnWarmup(WarmupOptimizer):  # type: ignore[misc]
        """A warm-up of a user."""

    training = warming(wrapper="none")
    training.optimizers = [OwnWarmup(training.optimizers[0], [])]
    with pytest.raises(SettingsError, match="found a OwnWarmup, whose own state cannot be saved"):
        checkpointer(training, place)
