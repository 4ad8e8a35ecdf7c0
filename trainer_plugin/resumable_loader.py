"""A position in the batches of a dataloader, to the batch, for loaders that have none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

from torch.utils.data import DataLoader

from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin import loader_generators, rng_state
from recpoint.trainer_plugin.reader import Stateful, refuse_prepared

__all__ = ["ResumableLoader"]

_log = logging.getLogger("recpoint")


class ResumableLoader:
    """The batches of `loader`, with a state: a `reader` for the Checkpointer, as a loader is one.

    A loader that has `state_dict` and `load_state_dict` itself, as torchdata's, is asked for its
    position. Of any other, like torch's DataLoader, the position is the number of batches given out
    since an epoch began, and the state of the random generators at that moment: after a restore the
    same epoch is begun with the same generators, and that many batches are read and dropped. So
    what such a loader gives must follow from generators at the beginning of an epoch, and what
    `set_epoch` tells its sampler: the global ones of python, numpy and torch, and those that are
    attributes of the loader, its samplers or its dataset.

    Args:
        loader: an iterable of batches; each `iter` of it is an epoch.

    Attributes:
        loader: it.
        before_fetch: called each time before the next batch is asked of the loader, when set.
        resumed_from: the state that was loaded last.
        begun: whether a batch has been asked for since `iter`.
        used: whether one was ever asked for.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable):
            raise SettingsError(
                "ResumableLoader(loader)",
                found=f"a {type(loader).__name__}",
                expected="an iterable of batches, such as a DataLoader",
                next_step="wrap the loader itself, not one of its batches or its iterator",
            )
        refuse_prepared("ResumableLoader(loader)", loader)
        self.loader = loader
        self.before_fetch: Callable[[], None] | None = None
        self.resumed_from: dict[str, Any] | None = None
        self.begun = self.used = False
        self._given = self._given_before = 0
        self._consumed: int | None = None
        self._began: dict[str, Any] | None = None
        self._before: dict[str, Any] | Exception | None = None
        self._loaded: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError if it has none, as usual

    @property
    def sampler(self) -> Any:
        """The sampler of `loader`; frameworks call its `set_epoch`."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of `loader`."""
        return getattr(self.loader, "batch_sampler", None)

    @property
    def dataset(self) -> Any:
        """The dataset of `loader`."""
        return getattr(self.loader, "dataset", None)

    def __iter__(self) -> Iterator[Any]:
        self.begun = False
        if self._loaded is None:
            self._forget_epoch()
        return self._epoch()

    def count_consumed(self) -> None:
        """One batch was trained: for a training loop that asks for one more before it trains.

        Never called, each batch counts as trained when `state_dict` is.
        """
        self.expect_counts()
        assert self._consumed is not None
        self._consumed += 1

    def expect_counts(self) -> None:
        """From now on batches count as trained by `count_consumed`; none of this epoch is yet."""
        if self._consumed is None:
            self._consumed = self._given_before

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were trained."""
        if self._loaded is not None:
            return self._loaded
        ahead = 0 if self._consumed is None else self._given - self._consumed
        if ahead == 0:
            return self._here()
        if isinstance(self._before, Exception):
            raise self._before
        if ahead != 1 or self._before is None:
            raise SettingsError(
                "the training dataloader",
                found=f"{ahead} batches that were read and not trained",
                expected="one at most",
                next_step="let a framework read one batch ahead at most, or none",
            )
        return {**self._before, "then": rng_state.capture()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position of `state_dict`, with the next `iter`."""
        if isinstance(self.loader, Stateful) and state["own"] is not None:
            self.loader.load_state_dict(state["own"])
        self._loaded = self.resumed_from = state

    @staticmethod
    def decides_next_epoch(state: dict[str, Any]) -> bool:
        """Whether what an epoch gives that begins at this position follows from it."""
        drawing = state.get("drawing")
        return state["own"] is not None or (drawing is not None and bool(drawing["states"]))

    def leave_behind(self, state: dict[str, Any]) -> None:
        """Begin the next epoch as it would begin after a position at the end of one.

        For frameworks that begin another epoch then, and do without `load_state_dict`.
        """
        if isinstance(self.loader, Stateful) and state["own"] is not None:
            self.load_state_dict(state)
        elif state.get("drawing") is not None:
            loader_generators.restore(self.loader, state["drawing"])

    def _forget_epoch(self) -> None:
        self._given, self._given_before, self._began, self._before = 0, 0, None, None
        if self._consumed is not None:
            self._consumed = 0

    def _now(self) -> dict[str, Any] | Exception:
        """The position; or why there is none, for whoever asks: training goes on without."""
        try:
            return self._here()
        except Exception as error:  # the loader's
            if came_from_handler(error):
                raise
            return error

    def _here(self) -> dict[str, Any]:
        return {**self._place(), "given": self._given, "fetch": rng_state.capture()}

    def _place(self) -> dict[str, Any]:
        # Copied: the loader goes on before this is stored.
        own = deepcopy(self.loader.state_dict()) if isinstance(self.loader, Stateful) else None
        return {
            "own": own,
            "began": self._began,
            "then": None,
            # For an epoch that begins here:
            "keeps_workers": self._keeps_workers,
            "drawing": None if own is not None else loader_generators.capture(self.loader),
        }

    def _epoch(self) -> Iterator[Any]:
        """Begins when its first batch is asked for: a framework may call `iter` much earlier."""
        self._tell()
        self.begun = self.used = True
        batches, resumed = self._begin()
        while True:
            if resumed is not None:
                # As it was read, or would have been: whoever begins an epoch early, or looks at
                # the first batch of one, may have drawn since the restore.
                rng_state.restore(resumed["fetch"])
            if self._may_be_ahead:
                self._before = self._now()
            batch = next(batches, self)
            if resumed is not None and resumed["then"] is not None:
                rng_state.restore(resumed["then"])
            resumed = None
            if batch is self:
                return
            self._given += 1
            yield batch
            self._tell()

    def _begin(self) -> tuple[Iterator[Any], dict[str, Any] | None]:
        """The batches that are left of the epoch, and what was loaded."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._forget_epoch()
            self._given = self._given_before = loaded["given"]
            if self._consumed is not None:
                self._consumed = self._given
        if isinstance(self.loader, Stateful):
            return iter(self.loader), loaded
        if loaded is not None and loaded["began"] is not None:
            if not self._is_left_behind(loaded):
                return self._skip(loaded), loaded
            self._forget_epoch()
            self._keep_workers(loaded.get("keeps_workers"))
            loader_generators.restore(self.loader, loaded["drawing"])
        elif loaded is not None:
            self._keep_workers(loaded.get("keeps_workers"))
            if loaded.get("drawing") is not None:
                loader_generators.restore(self.loader, loaded["drawing"])
            rng_state.restore(loaded["fetch"])
        self._began = self._generators()
        return iter(self.loader), None

    def _is_left_behind(self, loaded: dict[str, Any]) -> bool:
        """Whether all of its epoch was trained, and the script begins with a later one.

        Else it gives nothing and ends, as the epoch that was going on when training ended. Who
        counts epochs by `batches_done` has none for that one, and would lose the one after it.
        """
        drawing = loaded["began"].get("drawing")
        if drawing is None or not loader_generators.is_told_later(self.loader, drawing):
            return False
        try:
            return bool(loaded["given"] >= len(self))
        except (TypeError, NotImplementedError):
            return False

    def _skip(self, loaded: dict[str, Any]) -> Iterator[Any]:
        """Begin the epoch as it was begun then, and drop the batches that were trained."""
        self._keep_workers(loaded["began"].get("kept_workers"))
        rng_state.restore(loaded["began"]["global"])
        drawing = loaded["began"].get("drawing")
        if drawing is None:  # of an earlier release, with the loader's own generator alone
            drawing = {"states": {"generator": loaded["began"]["own"]}, "epochs": {}}
        loader_generators.restore(self.loader, drawing)
        told = loader_generators.set_epochs(self.loader, drawing)
        if told is not None:
            _log.warning(
                "the training dataloader's sampler was told to begin epoch %d, and %d batches of "
                "epoch %d are trained: that one goes on. Next: begin the loop over epochs with %d",
                told[0],
                loaded["given"],
                told[1],
                told[1],
            )
        self._began = self._generators()
        batches = iter(self.loader)
        for number in range(loaded["given"]):
            if next(batches, self) is self:
                raise SettingsError(
                    "the training dataloader",
                    found=f"{number} batches in the epoch",
                    expected=f"more than the {loaded['given']} that the checkpoint was trained on",
                    next_step="give the dataloader that the run was trained with",
                )
        return batches

    def _generators(self) -> dict[str, Any]:
        return {
            "global": rng_state.capture(),
            "drawing": loader_generators.capture(self.loader),
            "kept_workers": self._keeps_workers,
        }

    @property
    def _keeps_workers(self) -> bool:
        """Whether the next epoch is for workers that are there already (`persistent_workers`).

        torch's DataLoader draws a seed for the workers that it starts, and none for those it kept:
        from the same generators the one epoch is shuffled otherwise than the other.
        """
        return isinstance(self.loader, DataLoader) and self.loader._iterator is not None

    def _keep_workers(self, kept: bool | None) -> None:
        """Have the next epoch begin with workers that are there already, or with new ones.

        None: a checkpoint that does not say which it was.
        """
        if kept is None or kept == self._keeps_workers or not isinstance(self.loader, DataLoader):
            return
        if kept:
            iter(self.loader)  # starts them; the epoch that this begins is given up by the next
        else:
            self.loader._iterator = None

    @property
    def _may_be_ahead(self) -> bool:
        """Whether a framework that counts may read a batch before it trains the one before it."""
        if self._consumed is None:
            return False
        try:
            len(self)
        except (TypeError, NotImplementedError):
            return True
        return False

    def _tell(self) -> None:
        if self.before_fetch is not None:
            self.before_fetch()
