"""A loss is measured in loops of Lightning and Accelerate, and training is the same without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Checkpointer, Loss, Options, Precision, ResumableLoader, Staging
from tests.training_builder import Place, seed_everything
from tests.unit.trainer_plugin.test_loss_bound import Clicks, Ranker, count_seconds, loss_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*have no `val_dataloader`:UserWarning",
    "ignore:.*treespec.*:FutureWarning",
    "ignore:.*isinstance.*:FutureWarning",
    "ignore::DeprecationWarning",
)

BATCHES = 12


class ClickData(torch.utils.data.Dataset[Any]):
    """Some batches of clicks."""

    def __getitem__(self, number: int) -> Any:
        if number >= BATCHES:
            raise IndexError(number)
        clicks = Clicks()
        clicks.position = number
        return next(clicks)

    def __len__(self) -> int:
        return BATCHES


def by_loss(place: Place, measured: bool, of: Any) -> dict[str, Any]:
    loss = Precision(bits=Loss(increase=1e-3, of=of, share=0.5)) if measured else "lossless"
    return {
        "run": f"{place.run}-{measured}",
        "bits": loss,
        "staging": Staging(directory=place.staging, jobs=3),
        "options": Options(handle_sigterm=False, announce=False, on_error="raise"),
    }


def of_module(module: nn.Module, batch: Any) -> Tensor:
    assert isinstance(module, nn.Module)
    return loss_of(module.get_submodule("net"), batch)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD])
def test_lightning_trains_the_same_with_a_measured_loss(
    place: Place, accumulate: int, kind: Any
) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra [lightning]")
    from recpoint import LightningCallback

    class CountsSeconds(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if measured:
                assert callback.checkpointer is not None
                count_seconds(callback.checkpointer)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Ranker()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return of_module(self, batch)

        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.05)

    ends = []
    for measured in (False, True):
        seed_everything(1)
        module = Module()
        callback = LightningCallback(interval_batches=100, **by_loss(place, measured, of_module))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=accumulate,
            callbacks=[callback, CountsSeconds()],
        )
        loader = torch.utils.data.DataLoader(ClickData(), batch_size=None)
        trainer.fit(module, ResumableLoader(loader))
        ends.append([*module.state_dict().values(), torch.get_rng_state()])
        assert callback.checkpointer is not None
        figures = callback.checkpointer.stats.loss
        assert callback.checkpointer.batches_done == BATCHES // accumulate
        assert (figures is None) is not measured
        if figures is not None:
            assert figures.error is None and figures.batches >= 3
    assert all(torch.equal(plain, measured) for plain, measured in zip(*ends, strict=True))


def test_accelerate_trains_the_same_with_a_measured_loss(place: Place) -> None:
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for measured in (False, True):
        seed_everything(1)
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = Ranker()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        prepared, stepper = accelerator.prepare(model, optimizer)
        ckpt = Checkpointer(
            model,
            optimizer,
            reader=Clicks(),
            interval_batches=100,
            **by_loss(place, measured, loss_of),
        )
        with ckpt:
            if measured:
                count_seconds(ckpt)
            ckpt.restore()
            for batch in ckpt.batches(total=BATCHES):
                with accelerator.accumulate(prepared):
                    accelerator.backward(loss_of(prepared, batch))
                    stepper.step()
                    stepper.zero_grad()
            figures = ckpt.stats.loss
            assert (figures is None) is not measured
            assert figures is None or (figures.error is None and figures.batches >= 3)
            ends.append([*model.state_dict().values(), torch.get_rng_state()])
            ckpt.close(final=False)
    assert all(torch.equal(plain, measured) for plain, measured in zip(*ends, strict=True))
