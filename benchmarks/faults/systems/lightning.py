"""Lightning's ModelCheckpoint, and `ckpt_path="last"`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from benchmarks.faults.system import (
    Begin,
    Hostile,
    Model,
    Restored,
    System,
    Tags,
    Trainer,
    train,
)
from benchmarks.faults.systems.dcp import LACKS
from benchmarks.faults.systems.step_folders import NoCheckpoint
from benchmarks.faults.systems.torch_save import falsified_zip

__all__ = ["Lightning"]


class _Fits(Trainer):
    """Fits one batch more for each save; the callback saves after each batch."""

    def __init__(self, place: Path, begin: Begin, keep: int | None, overwrite: bool) -> None:
        self._place, self._keep, self._overwrite = place, keep, overwrite
        self._from: str | None = "last" if begin == "newest" and _saved(place) else None
        if overwrite:
            self._from = str(place / "step_1.ckpt")

    def save(self, tags: Tags) -> None:
        trainer, callback = _trainer(
            self._place, steps=len(tags), keep=self._keep, overwrite=self._overwrite
        )
        trainer.fit(_module(tags), _batches(), ckpt_path=self._from)
        self._from = callback.last_model_path or callback.best_model_path


def _saved(place: Path) -> bool:
    return any(place.glob("*.ckpt"))


def _trainer(
    place: Path, *, steps: int, keep: int | None = None, overwrite: bool = False
) -> tuple[Any, Any]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = ModelCheckpoint(
        dirpath=place,
        filename="step_{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=1,
        save_top_k=-1 if keep is None else keep,
        save_last=True,
        enable_version_counter=not overwrite,
    )
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    return trainer, callback


def _batches() -> Any:
    import torch

    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1, 1)))


def _module(tags: Tags) -> Any:
    """Return a module that trains the batches of `tags`; without tags, it notes its start."""
    import lightning
    import torch

    class Module(lightning.LightningModule):
        """The model, trained by hand, so that a batch is one of ours."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = Model()
            self.found: tuple[int, dict[str, torch.Tensor]] | None = None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

        def training_step(self, *_: Any) -> None:
            # One optimizer, in Lightning's wrapper, whose steps count as `global_step`.
            optimizer = cast("torch.optim.Optimizer", self.optimizers())
            train(self.model, optimizer, tags[self.global_step])

        def on_train_start(self) -> None:
            if not tags:
                state = self.model.state_dict()
                self.found = self.global_step, {name: t.clone() for name, t in state.items()}
                self.trainer.should_stop = True

    return Module()


class Lightning(System):
    """A checkpoint after each batch, all kept, and `save_last`."""

    name = "lightning"
    title = "Lightning"
    distributions = ("lightning",)
    modules = ("lightning",)
    used = (
        '`ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, save_last=True)`, `fit(ckpt_path="'
        'last")`; `save_top_k=1` where retention is tried'
    )
    retention = "save"
    lacks = {
        **{
            fault: reason
            for fault, reason in LACKS.items()
            if not reason.startswith("has no retention")
        },
        "retention racing a consolidation": "has no consolidation",
        "worker killed": "the trainer itself writes",
        "503, throttling, time-outs, resets": "not tried",
        "store dies in an upload": "not tried",
        "path traversal": "a checkpoint is one file, and names no other",
    }

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        yield _Fits(self.place.store, begin, keep, overwrite)

    def restore(self) -> Restored:
        """See `System.restore`."""
        if not _saved(self.place.store):
            raise NoCheckpoint(f"{self.place.store}: no checkpoint")
        trainer, _ = _trainer(self.place.store, steps=10**6)
        trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ == "ModelCheckpoint"]
        module = _module(())
        trainer.fit(module, _batches(), ckpt_path="last")
        step, state = module.found
        return step, state

    def files(self, step: int) -> list[Path]:
        """See `System.files`."""
        files = [self.place.store / f"step_{step}.ckpt", self.place.store / "last.ckpt"]
        return [path for path in files if path.exists()]

    def names(self, step: int) -> list[str]:
        """See `System.names`."""
        return [f"step_{step}.ckpt", "last.ckpt"]

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """See `System.falsify`."""
        paths = self.files(step)
        for path in paths:
            falsified_zip(path, what)
        return paths
