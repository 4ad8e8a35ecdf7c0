"""Lightning asks for a new dataloader each epoch; a restart goes on in the middle of one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="needs the extra [lightning]")

from lightning.pytorch.callbacks import Callback  # noqa: E402
from torch.utils.data import DataLoader, Subset  # noqa: E402

from recpoint import LightningCallback, Options, ResumableLoader, Staging  # noqa: E402
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store  # noqa: E402
from recpoint.errors import SettingsError  # noqa: E402
from tests.lightning_builder import Breaks, Module, Samples, ended, fit, loader  # noqa: E402
from tests.training_builder import BATCH, Place, seed_everything  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*have no `val_dataloader`:UserWarning",
    "ignore:.*treespec.*:FutureWarning",
    "ignore:.*isinstance.*:FutureWarning",
    "ignore::DeprecationWarning",
)

BATCHES = 5  # of an epoch


class Reloads(Module):
    """Trains each epoch on samples of its own, in a dataloader of its own."""

    def __init__(self, kind: str = "shuffled") -> None:
        super().__init__()
        self._kind = kind
        self.asked: list[int] = []

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        self.asked.append(epoch)
        if self._kind == "stream":
            return loader("stream")
        numbers = range(epoch, epoch + BATCHES * BATCH)
        return ResumableLoader(
            DataLoader(Subset(Samples(1000), numbers), batch_size=BATCH, shuffle=True)
        )


def _callback(place: Place) -> LightningCallback:
    return LightningCallback(
        run=place.run,
        staging=Staging(directory=place.staging, when_busy="wait"),
        interval_batches=1,
        options=Options(on_error="raise"),
    )


def _fit(module: Module, *callbacks: Callback, **settings: Any) -> Any:
    return fit(
        module,
        None,
        *callbacks,
        **{"reload_dataloaders_every_n_epochs": 1, "validate": False, **settings},
    )


@pytest.mark.parametrize(
    "at",
    [
        *(
            pytest.param(at, marks=pytest.mark.nightly("loops"))
            for at in (BATCHES - 1, BATCHES, 2 * BATCHES)
        ),
        BATCHES + 3,
    ],
)
def test_a_fit_goes_on_in_the_dataloader_of_its_epoch(place: Place, at: int) -> None:
    seed_everything(1)
    whole = Reloads()
    expected = ended(_fit(whole))
    assert whole.asked == [0, 1, 2]
    with place.agent():
        seed_everything(1)
        with pytest.raises(RuntimeError, match="at batch"):
            _fit(Reloads(), _callback(place), Breaks(at))
        steps = [name.step for name in Run.open(open_store(place.run)).live_line()]
        # Checkpoints go on after the first epoch; an exception does not wait for the last one.
        assert max(steps) in (at - 1, at)
        seed_everything(2)
        module = Reloads()
        trainer = _fit(module, _callback(place))
    assert ended(trainer) == expected
    assert len(module.seen) in (len(whole.seen) - at, len(whole.seen) - at + 1)
    assert module.seen == whole.seen[-len(module.seen) :]


def test_a_fit_goes_on_after_its_last_epoch(place: Place) -> None:
    """More epochs than the run was asked for at first: the next one has its own dataloader."""
    seed_everything(1)
    whole = Reloads()
    _fit(whole, max_epochs=3)
    with place.agent():
        seed_everything(1)
        _fit(Reloads(), _callback(place), max_epochs=2)
        seed_everything(2)
        module = Reloads()
        _fit(module, _callback(place), max_epochs=3)
    assert module.seen == whole.seen[2 * BATCHES :]


@pytest.mark.parametrize(
    ("kind", "epochs", "fault"),
    [("shuffled", 2, "several epochs"), ("stream", 1, "no length")],
)
def test_dataloaders_that_a_restart_would_not_build_alike(
    place: Place, kind: str, epochs: int, fault: str
) -> None:
    with pytest.raises(SettingsError, match=fault):
        _fit(Reloads(kind), _callback(place), reload_dataloaders_every_n_epochs=epochs)
