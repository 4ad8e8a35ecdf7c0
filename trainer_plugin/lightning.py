"""Takes and restores checkpoints of a training that Lightning's Trainer runs.

A checkpoint is cut when Lightning asks for the next batch. At that point the optimizers, the
schedulers, a validation that was due and all other hooks of the batch before are done. Lightning's
own checkpoints are taken at the end of a batch, before some of these are done; and if the
dataloader has no length, Lightning has already read one more batch by then.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from recpoint.errors import SettingsError
from recpoint.installation import install_command
from recpoint.trainer_plugin.checkpointer import Checkpointer
from recpoint.trainer_plugin.lightning_averages import refuse_averages
from recpoint.trainer_plugin.loss_setting import Loss
from recpoint.trainer_plugin.policy import Policy, PolicyName
from recpoint.trainer_plugin.setting_checks import instance_of
from recpoint.trainer_plugin.settings import (
    Bits,
    ExpectedFailures,
    Options,
    Precision,
    Staging,
    Timeouts,
)
from recpoint.trainer_plugin.state.lookahead import Lookahead
from recpoint.trainer_plugin.state.reader import ResumableLoader, Stateful

__all__ = ["CheckpointerArguments", "LightningCallback"]


try:
    from lightning.pytorch import Callback, LightningModule
except ImportError:
    try:
        from pytorch_lightning import (  # type: ignore[assignment]
            Callback,
            LightningModule,
        )
    except ImportError as error:
        raise SettingsError(
            "recpoint.LightningCallback",
            found="no lightning installed",
            expected="lightning, or pytorch-lightning",
            next_step=install_command("lightning"),
        ) from error


_log = logging.getLogger("recpoint")

_EXTRA = "lightning"

#: Parameters of `Checkpointer` whose values come from Lightning.
_OF_LIGHTNING = ("model", "optimizers", "reader", "schedulers")


class CheckpointerArguments(TypedDict, total=False):
    """Keyword arguments of `Checkpointer` that the callback takes, with the same defaults."""

    run: Required[str]
    extras: Mapping[str, Stateful] | None
    interval_batches: int | None
    interval_seconds: float | Literal["auto"] | None
    bits: Precision | Bits | Loss
    policy: Policy | PolicyName
    failures: ExpectedFailures | None
    staging: Staging | str | Path | None
    timeouts: Timeouts
    options: Options


class LightningCallback(Callback):
    """Restores before the first batch, and takes checkpoints during `Trainer.fit`.

        loader = recpoint.ResumableLoader(DataLoader(...))
        callback = recpoint.LightningCallback(run=URL, interval_batches=1000)
        Trainer(callbacks=[callback], max_epochs=3).fit(module, loader)

    If you start the same script again, it goes on from the newest checkpoint, bit for bit. A
    checkpoint holds the module, its optimizers and schedulers, Lightning's counters of epochs,
    batches and steps, the states of the other callbacks, of the data module and of a gradient
    scaler, the random generators, and the position in the dataloader. As in Lightning's own
    checkpoints, metrics that are being accumulated are left out. What
    `LightningModule.on_save_checkpoint` adds is left out, too; use `extras` for it.

    The Checkpointer counts a batch when an optimizer has stepped. With accumulated gradients, that
    takes several of Lightning's batches; no checkpoint is cut between those. If you use manual
    optimization, no accumulated gradient may be left at the end of a batch in which an optimizer
    stepped.

    A final checkpoint is taken when training ends, or before the next batch after a SIGTERM. After
    an error it is taken only if reading the next batch failed: any other error may have left half a
    step, or may come from what the module holds.

    Args:
        restore: arguments of `Checkpointer.restore`, such as `{"fresh": True}`.
        arguments: arguments of `Checkpointer`, which describes them. `model`, `optimizers`,
            `reader` and `schedulers` come from Lightning and are not allowed. The others are:
            `run`, the run URL; `extras`, other objects with a state, by name; `interval_batches` or
            `interval_seconds` between checkpoints; `bits` of stored rows; `policy`, what a
            checkpoint holds; `failures` to expect; `staging` area; `timeouts`; `options`. With
            `Options.handle_sigterm`, the final checkpoint on SIGTERM is taken before the next
            batch.

    Attributes:
        checkpointer: the Checkpointer of the last fit, during it and after it; None: no fit has
            begun.

    Raises:
        SettingsError: an argument is not allowed because its value comes from Lightning. A fit
            refuses `WeightAveraging`, whose average would be in no checkpoint.
        TypeError: `Checkpointer` has no such argument, or `run` is missing.
    """

    __signature__ = inspect.Signature(
        [
            *(
                parameter
                for name, parameter in inspect.signature(Checkpointer).parameters.items()
                if name not in _OF_LIGHTNING
            ),
            inspect.Parameter("restore", inspect.Parameter.KEYWORD_ONLY, default=None),
        ]
    )

    def __init__(
        self,
        *,
        restore: Mapping[str, Any] | None = None,
        **arguments: Unpack[CheckpointerArguments],
    ) -> None:
        super().__init__()
        for name in _OF_LIGHTNING:
            if name in arguments:
                raise SettingsError(
                    f"recpoint.LightningCallback({name}=...)",
                    found="a value",
                    expected="no value, because it comes from Lightning",
                    next_step=f"remove {name}=",
                )
        bound = self.__signature__.bind(restore=restore, **arguments)
        bound.apply_defaults()
        self._restore = {} if restore is None else dict(restore)
        self._extras = dict(bound.arguments["extras"] or {})
        self._options = instance_of("options", bound.arguments["options"], Options)
        self._arguments: dict[str, Any] = dict(arguments)
        self.checkpointer: Checkpointer | None = None
        self._position = _Position()
        self._loops: dict[str, Any] | None = None
        self._steps = 0
        self._stepped = self._partial = self._between = False

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Build the Checkpointer and restore; model and optimizers are on their devices now."""
        self._stepped = self._partial = self._between = False
        self.checkpointer = self._loops = None
        if trainer.fast_dev_run:
            _log.info("fast_dev_run: nothing is restored, and no checkpoint is taken")
            return
        refuse_averages(trainer.callbacks, pl_module)
        if type(pl_module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
            _log.warning(
                "%s.on_save_checkpoint is not called for recpoint's checkpoints. Next: pass what "
                "it saves as extras={name: thing}, or return it from get_extra_state() of a module",
                type(pl_module).__name__,
            )
        self._position = _Position()
        state = _FitState(trainer, self)
        checkpointer = Checkpointer(
            pl_module,
            trainer.optimizers,
            reader=self._position,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            **self._arguments
            | {
                "extras": {**self._extras, _EXTRA: state},
                # Lightning has not installed its handler yet; see on_train_start.
                "options": replace(self._options, handle_sigterm=False),
            },
        )
        checkpointer.restore(**self._restore)
        self.checkpointer = checkpointer
        if state.loaded is not None:
            self._loops = state.loaded["loops"]
            loop_state = {**self._loops["state_dict"], "combined_loader": [self._position.saved]}
            trainer.fit_loop.load_state_dict({**self._loops, "state_dict": loop_state})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Follow the dataloader, and handle SIGTERM before Lightning does."""
        if self.checkpointer is None:
            return
        _refuse_reloads(trainer)
        loader = _loader_of(trainer)
        saved = self._position.saved
        if saved is not None and loader.resumed_from is not saved:
            # Lightning begins another epoch, and does not load the state of the one that ended.
            if loader.begun and loader.decides_next_epoch(saved):
                raise SettingsError(
                    "the training dataloader",
                    found="a dataloader without a length, from which Lightning has read a batch "
                    "before its state was set",
                    expected="one that goes on where the last epoch of the checkpoint ended",
                    next_step="give it a __len__, or train with max_steps instead of max_epochs",
                )
            # Where each epoch has a dataloader of its own, the next one does not follow the last.
            if not trainer.reload_dataloaders_every_n_epochs:
                loader.leave_behind(saved)
        self._follow(loader)
        self._steps = trainer.global_step
        if self._options.handle_sigterm:
            # Called now, so that the signal is passed on to Lightning's handler, which exists now.
            self.checkpointer.take_sigterm()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Follow the dataloader of this epoch, if Lightning has asked for another one."""
        if self.checkpointer is None or not trainer.reload_dataloaders_every_n_epochs:
            return
        loader = _loader_of(trainer)
        if loader is not self._position.loader:
            self._leave_loader()
            self._follow(loader)

    def on_train_batch_start(
        self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note that a batch begins, and have it measured if a loss decides about widths.

        Before the first batch, Lightning's counters are set again.
        """
        self._between = False
        if self._loops is not None:
            # If a validation was due after the last batch before the restart, Lightning has counted
            # that batch twice.
            loop = trainer.fit_loop.epoch_loop
            loop.on_load_checkpoint(self._loops["epoch_loop.state_dict"])
            self._loops = None
        if self.checkpointer is not None:
            self.checkpointer._training.next_batch.offer(batch)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch; a checkpoint waits, because other hooks of the batch come later."""
        if self.checkpointer is None:
            return
        assert self._position.loader is not None
        self._position.loader.count_consumed()
        self._partial = trainer.global_step == self._steps
        self._stepped = self._stepped or not self._partial
        self._steps = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Take a final checkpoint."""
        self._end()

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """End checkpointing if no batch was trained, because training had ended before."""
        self._end()

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take a final checkpoint if only reading the next batch has failed."""
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        if self._between and not self._partial:
            self._end()
            return
        self._leave_loader()
        checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def _between_batches(self) -> None:
        """Count a batch when the next one is asked for and all hooks of the batch are done."""
        checkpointer = self.checkpointer
        if checkpointer is not None and self._stepped and not self._partial:
            self._stepped = False
            checkpointer.step()
        self._between = True

    def _end(self) -> None:
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        self._leave_loader()
        if self._stepped:
            self._stepped = False
            checkpointer.step()
        checkpointer.close()

    def _follow(self, loader: ResumableLoader) -> None:
        """Take positions from this dataloader, which Lightning reads from now on."""
        loader.expect_counts()
        loader.before_fetch = self._between_batches
        self._position.loader = loader

    def _leave_loader(self) -> None:
        if self._position.loader is not None:
            self._position.loader.before_fetch = None


class _Position:
    """Serves as the Checkpointer's reader: the training dataloader, once Lightning has it."""

    def __init__(self) -> None:
        self.loader: ResumableLoader | None = None
        self.saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        return self.saved if self.loader is None else self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.saved = state


class _FitState:
    """Captures and restores Lightning's own state, under the names in its own checkpoints."""

    def __init__(self, trainer: Any, callback: LightningCallback) -> None:
        self._trainer = trainer
        self._callback = callback
        # The state has the scaler's, so there is no warning that the scaler is in no checkpoint.
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        # Each rank has its own position, which the reader stores.
        loops["state_dict"].pop("combined_loader", None)
        other_callbacks = [
            callback for callback in trainer.callbacks if callback is not self._callback
        ]
        return {
            "loops": loops,
            "callbacks": {
                callback.state_key: deepcopy(callback.state_dict()) for callback in other_callbacks
            },
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, self.loaded = self._trainer, state
        for callback in trainer.callbacks:
            if callback is not self._callback and state["callbacks"].get(callback.state_key):
                callback.load_state_dict(deepcopy(state["callbacks"][callback.state_key]))
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])


def _refuse_reloads(trainer: Any) -> None:
    """Refuse dataloaders of several epochs each, which a restart would not build alike.

    Lightning builds one when training starts. It does not know how many epochs the last dataloader
    had served.

    Raises:
        SettingsError: a dataloader is to serve several epochs; or one of a single epoch has no
            length, so that Lightning reads its first batch before the callback knows it.
    """
    epochs = trainer.reload_dataloaders_every_n_epochs
    if epochs > 1:
        raise SettingsError(
            f"Trainer(reload_dataloaders_every_n_epochs={epochs})",
            found="a dataloader for several epochs; after a restart within them, Lightning would "
            "build another one and use it longer",
            expected="0 or 1",
            next_step="set it to 1, and have train_dataloader() return what the epoch needs",
        )
    if epochs and trainer.fit_loop.max_batches == float("inf"):
        raise SettingsError(
            "the training dataloader",
            found="no length, and reload_dataloaders_every_n_epochs=1: Lightning reads the first "
            "batch of an epoch before recpoint has its dataloader",
            expected="a dataloader with a length, or the same one in each epoch",
            next_step="give it a __len__, or set reload_dataloaders_every_n_epochs=0",
        )


def _loader_of(trainer: Any) -> ResumableLoader:
    """Return the training dataloader.

    Raises:
        SettingsError: it cannot be resumed, or all ranks would train on the same samples.
    """
    loader = trainer.train_dataloader
    if isinstance(loader, Lookahead):
        raise SettingsError(
            "the training dataloader",
            found="a Lookahead, from which Lightning would read batches that it does not count",
            expected="one recpoint.ResumableLoader",
            next_step="call fit(module, lookahead.reader) if that is a ResumableLoader; or write "
            "the training loop with recpoint.Checkpointer, which can look ahead",
        )
    if not isinstance(loader, ResumableLoader):
        raise SettingsError(
            "the training dataloader",
            found=f"a {type(loader).__name__}",
            expected="one recpoint.ResumableLoader, which knows its position to the batch",
            next_step="call fit(module, recpoint.ResumableLoader(loader)), or return a "
            "ResumableLoader from train_dataloader()",
        )
    inner = loader.loader
    if trainer.world_size > 1 and isinstance(inner, DataLoader):
        iterable = isinstance(inner.dataset, IterableDataset)
        if not iterable and not isinstance(inner.sampler, DistributedSampler):
            raise SettingsError(
                "the training dataloader",
                found=f"{trainer.world_size} ranks and a {type(inner.sampler).__name__}",
                expected="a DistributedSampler, which Lightning adds only to bare DataLoaders",
                next_step="build the DataLoader with sampler=DistributedSampler(dataset, ...)",
            )
    return loader
