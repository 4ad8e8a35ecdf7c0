"""Checkpoints of what Lightning's Trainer fits.

A checkpoint is cut where Lightning asks for the next batch: then the optimizers, the schedulers, a
validation that was due and every other hook of the batch before are done. Lightning's own place for
checkpoints, the end of a batch, is before some of these, and of a dataloader without a length it
has read one batch more by then.
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
from recpoint.trainer_plugin.checkpointer import Checkpointer
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
            next_step="pip install 'recpoint[lightning]'",
        ) from error


_log = logging.getLogger("recpoint")

_EXTRA = "lightning"

#: Parameters of `Checkpointer` that Lightning has the values of.
_OF_LIGHTNING = ("model", "optimizers", "reader", "schedulers")


class CheckpointerArguments(TypedDict, total=False):
    """Keywords of `Checkpointer` that a callback takes, with the defaults that they have there."""

    run: Required[str]
    extras: Mapping[str, Stateful] | None
    interval_batches: int | None
    interval_seconds: float | Literal["auto"] | None
    bits: Precision | Bits
    policy: Policy | PolicyName
    failures: ExpectedFailures | None
    staging: Staging | str | Path | None
    timeouts: Timeouts
    options: Options


class LightningCallback(Callback):
    """Restores before the first batch, and takes checkpoints of the whole of `Trainer.fit`.

        loader = recpoint.ResumableLoader(DataLoader(...))
        callback = recpoint.LightningCallback(run=URL, interval_batches=1000)
        Trainer(callbacks=[callback], max_epochs=3).fit(module, loader)

    The same script, started again, goes on from the newest checkpoint, bit for bit: the module, its
    optimizers and schedulers, Lightning's counters of epochs, batches and steps, the states of the
    other callbacks, of the data module and of a gradient scaler, the random generators, and the
    position in the dataloader. Left out, as by Lightning itself: metrics that are being
    accumulated, and what `LightningModule.on_save_checkpoint` adds; use `extras`.

    A batch of the checkpointer is one in which an optimizer stepped: with accumulated gradients,
    several of Lightning's. Between two of those nothing is cut. In manual optimization this is for
    modules that leave no gradient accumulated when a batch ends in which one of their optimizers
    stepped.

    When training ends, or with SIGTERM at the next batch, there is a final checkpoint; with an
    error only if it came while the next batch was read: else half a step may have been made, or
    what the module holds may be the error.

    Args:
        restore: arguments of `Checkpointer.restore`, such as `{"fresh": True}`.
        arguments: those of `Checkpointer`, which says more of each, but for `model`, `optimizers`,
            `reader` and `schedulers`, which are Lightning's: `run`, the run URL; `extras`, by name
            what else has a state; `interval_batches` or `interval_seconds` between checkpoints;
            `bits` of stored rows; `policy`, what a checkpoint holds; `failures` to expect;
            `staging` area; `timeouts`; `options`. With `Options.handle_sigterm` the final
            checkpoint on SIGTERM is taken before the next batch.

    Attributes:
        checkpointer: while a fit runs, and after it; None: no fit has begun.

    Raises:
        SettingsError: an argument that comes from Lightning here, as optimizers do.
        TypeError: an argument that `Checkpointer` has not, or none for `run`.
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
                    expected="none: it is what Lightning has",
                    next_step=f"leave {name} out",
                )
        given = self.__signature__.bind(restore=restore, **arguments)
        given.apply_defaults()
        self._restore = {} if restore is None else dict(restore)
        self._extras = dict(given.arguments["extras"] or {})
        self._options = instance_of("options", given.arguments["options"], Options)
        self._arguments: dict[str, Any] = dict(arguments)
        self.checkpointer: Checkpointer | None = None
        self._position = _Position()
        self._loops: dict[str, Any] | None = None
        self._steps = 0
        self._stepped = self._partial = self._between = False

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Build the Checkpointer, and restore: model and optimizers are on their devices."""
        self._stepped = self._partial = self._between = False
        self.checkpointer = self._loops = None
        if trainer.fast_dev_run:
            _log.info("fast_dev_run: nothing is restored, and no checkpoint is taken")
            return
        if type(pl_module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
            _log.warning(
                "%s.on_save_checkpoint is not called for recpoint's checkpoints. Next: give what "
                "it saves as extras={name: thing}, or by get_extra_state() of a module",
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
                # Lightning's handler is not there yet; see on_train_start.
                "options": replace(self._options, handle_sigterm=False),
            },
        )
        checkpointer.restore(**self._restore)
        self.checkpointer = checkpointer
        if state.loaded is not None:
            self._loops = state.loaded["loops"]
            own = {**self._loops["state_dict"], "combined_loader": [self._position.saved]}
            trainer.fit_loop.load_state_dict({**self._loops, "state_dict": own})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Follow the dataloader, and take SIGTERM from Lightning."""
        if self.checkpointer is None:
            return
        loader = _loader_of(trainer)
        saved = self._position.saved
        if saved is not None and loader.resumed_from is not saved:
            # Lightning begins another epoch then, and does without the state of the one that ended.
            if loader.begun and loader.decides_next_epoch(saved):
                raise SettingsError(
                    "the training dataloader",
                    found="one without a length, of which a batch was read before its state is set",
                    expected="one that goes on from where the last epoch of the checkpoint ended",
                    next_step="give it a __len__, or train with max_steps instead of max_epochs",
                )
            loader.leave_behind(saved)
        loader.expect_counts()
        loader.before_fetch = self._between_batches
        self._position.loader = loader
        self._steps = trainer.global_step
        if self._options.handle_sigterm:
            # Only now is it Lightning's handler that the signal is handed on to.
            self.checkpointer.take_sigterm()

    def on_train_batch_start(
        self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is there, and training goes on."""
        self._between = False
        if self._loops is not None:
            # Lightning has counted the last batch before the restart again, where a validation was
            # due after it.
            loop = trainer.fit_loop.epoch_loop
            loop.on_load_checkpoint(self._loops["epoch_loop.state_dict"])
            self._loops = None

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count; the rest of the batch's hooks come after this one."""
        if self.checkpointer is None:
            return
        assert self._position.loader is not None
        self._position.loader.count_consumed()
        self._partial = trainer.global_step == self._steps
        self._stepped = self._stepped or not self._partial
        self._steps = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """A final checkpoint."""
        self._end()

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Training that had ended before was restored, and no batch was trained."""
        self._end()

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """A final checkpoint if nothing but reading the next batch has failed."""
        checkpointer = self.checkpointer
        if checkpointer is None:
            return
        if self._between and not self._partial:
            self._end()
            return
        self._leave_loader()
        checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    def _between_batches(self) -> None:
        """The next batch is asked for, and all of the one before is done."""
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

    def _leave_loader(self) -> None:
        if self._position.loader is not None:
            self._position.loader.before_fetch = None


class _Position:
    """The reader of the Checkpointer: the training dataloader, once Lightning has it."""

    def __init__(self) -> None:
        self.loader: ResumableLoader | None = None
        self.saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        return self.saved if self.loader is None else self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.saved = state


class _FitState:
    """What Lightning keeps itself, by the names that its own checkpoints give it."""

    def __init__(self, trainer: Any, callback: LightningCallback) -> None:
        self._trainer = trainer
        self._callback = callback
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        # Each rank has its own position, in the reader's place.
        loops["state_dict"].pop("combined_loader", None)
        others = [other for other in trainer.callbacks if other is not self._callback]
        return {
            "loops": loops,
            "callbacks": {other.state_key: deepcopy(other.state_dict()) for other in others},
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, self.loaded = self._trainer, state
        for other in trainer.callbacks:
            if other is not self._callback and state["callbacks"].get(other.state_key):
                other.load_state_dict(deepcopy(state["callbacks"][other.state_key]))
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])


def _loader_of(trainer: Any) -> ResumableLoader:
    """The dataloader that is trained from.

    Raises:
        SettingsError: it cannot be resumed, or all ranks would train on the same samples.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, ResumableLoader):
        raise SettingsError(
            "the training dataloader",
            found=f"a {type(loader).__name__}",
            expected="one recpoint.ResumableLoader, which knows its position to the batch",
            next_step="fit(module, recpoint.ResumableLoader(loader)), or return it from "
            "train_dataloader()",
        )
    inner = loader.loader
    if trainer.world_size > 1 and isinstance(inner, DataLoader):
        iterable = isinstance(inner.dataset, IterableDataset)
        if not iterable and not isinstance(inner.sampler, DistributedSampler):
            raise SettingsError(
                "the training dataloader",
                found=f"{trainer.world_size} ranks and a {type(inner.sampler).__name__}",
                expected="a DistributedSampler: Lightning gives one to bare DataLoaders only",
                next_step="build the DataLoader with sampler=DistributedSampler(dataset, ...)",
            )
    return loader
