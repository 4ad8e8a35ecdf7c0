"""Stores the position of batch readers, and gives dataloaders without a position one.

The methods that recpoint needs of a reader of batches, and of other objects with a state. A
torchdata `StatefulDataLoader` fits as it is, with and without worker processes. The state does not
include what a dataset draws at random inside a worker, so seed such draws by the sample's index.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler, let_into
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.in_flight import InFlight, TakenBatch
from recpoint.trainer_plugin.state.loader_parts import (
    capture,
    is_told_later,
    restore,
    set_epochs,
    with_epoch,
)

__all__ = [
    "Divisible",
    "Passes",
    "ResumableLoader",
    "Stateful",
    "announce",
    "refuse_prepared",
    "tell_epoch",
]


_log = logging.getLogger("recpoint")


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is saved and restored: a reader, a metric, a gradient scaler.

    The state must consist of values that format §3.4 can store: None, bool, int, float, str, bytes,
    tensors, numpy arrays, and lists, tuples and dicts of those.
    """

    def state_dict(self) -> Any:
        """Return the present state; for a reader, after the batches that training has consumed.

        The method MUST NOT change rows of tables: other threads may be copying them already.
        """

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from a state that `state_dict` returned, in this or another process."""


@runtime_checkable
class BatchBudget(Protocol):
    """A reader that is told how far it may read ahead."""

    def batches_until_checkpoint(self, n: int, /) -> None:
        """Take note that at most `n` further batches are consumed before the reader is asked again.

        Called when training starts, after each checkpoint, and when more batches are granted before
        the next one. If the interval is in seconds, it is granted in about eight parts. A reader
        with workers stops after `n` batches, so that no batch is in flight when its state is taken.
        """


@runtime_checkable
class Divisible(Protocol):
    """A reader of one rank that can go on where readers of another number of ranks stopped."""

    def load_state_dicts(self, states: Sequence[Any], rank: int, ranks: int, /) -> None:
        """Go on from the states of the readers of all ranks of a checkpoint.

        Together, the `ranks` readers MUST read exactly the samples that the earlier readers had
        left: none lost, none twice.

        Args:
            states: state of the reader of each rank of the checkpoint, in rank order.
            rank: rank of this process.
            ranks: number of ranks now; it differs from the number of states.
        """


class Passes(NamedTuple):
    """How far training has gone through its reader; stored with the reader's position.

    A reader's position alone does not say which epoch it is in. It also does not say whether the
    end of an epoch was reached or only its last batch; `batches` says this.

    Attributes:
        done: number of epochs that have ended.
        batches: number of batches trained in the present epoch; 0: it has not begun.
    """

    done: int = 0
    batches: int = 0


def tell_epoch(reader: object, epoch: int) -> None:
    """Call `set_epoch(epoch)` of the reader, its samplers and its dataset, if they have it."""
    loader = reader.loader if isinstance(reader, ResumableLoader) else reader
    receivers: list[Any] = [reader] if loader is reader else [reader, loader]
    receivers += [part for _, part in with_epoch(loader)]
    for part in receivers:
        if callable(getattr(type(part), "set_epoch", None)):
            part.set_epoch(epoch)


def announce(reader: object, n: int) -> bool:
    """Tell a reader how many batches are left before the next decision.

    Returns:
        Whether the reader is a `BatchBudget` and was told.
    """
    if not isinstance(reader, BatchBudget):
        return False
    budget = reader  # narrowed
    let_into(lambda: budget.batches_until_checkpoint(n))
    return True


def refuse_prepared(subject: str, loader: object) -> None:
    """Refuse a loader whose `state_dict` is Accelerate's, because that is not a position.

    Over torch's DataLoader, it has no position to return. Over a `StatefulDataLoader`, it includes
    neither the order of a shuffled epoch nor the epoch's number, so that after a restore other
    samples would come, unnoticed.

    Raises:
        SettingsError: the loader is such a loader.
    """
    state_dict = getattr(type(loader), "state_dict", None)
    module_name = (
        getattr(state_dict, "__module__", None) or ""
    )  # a compiled method may have no module
    if module_name.partition(".")[0] == "accelerate":
        raise SettingsError(
            subject,
            found=f"a {type(loader).__name__} of Accelerate's prepare(), whose state_dict() does "
            "not say which samples come next",
            expected="the loader that was given to prepare()",
            next_step="pass ResumableLoader(loader) as the reader, without prepare() for the "
            "loader: move batches to accelerator.device yourself, and with several processes give "
            "each a DistributedSampler, as examples/accelerate_loop.py shows",
        )


class ResumableLoader:
    """Makes a loader resumable: yields its batches, and serves as `reader` of the Checkpointer.

    If the loader itself has `state_dict` and `load_state_dict`, as torchdata's has, these give the
    position. For any other loader, such as torch's DataLoader, the position is the number of
    batches given out since the epoch began, and the state of the random generators at its
    beginning. After a restore, the same epoch is begun with the same generators, and that many
    batches are read and dropped. Therefore the batches of such a loader must depend only on the
    epoch that `set_epoch` sets and on generators at the beginning of the epoch. These are the
    global generators of Python, numpy and torch, and generators that are attributes of the loader,
    its samplers or its dataset.

    A prefetcher or a pipeline takes batches before it trains them. The position is then that of the
    last batch that was trained, and a restore reads the batches after it again, each with the
    global generators as they were when it was first read.

    Args:
        loader: an iterable of batches; each `iter` of it is an epoch.

    Attributes:
        loader: the loader.
        before_fetch: if set, called each time before the loader is asked for the next batch.
        in_flight: the batches that were given out and not trained, if these are counted.
        resumed_from: the state that was loaded last.
        begun: whether a batch has been asked for since the last `iter`.
        used: whether a batch was ever asked for.

    Raises:
        SettingsError: `loader` is not iterable, or is a loader that Accelerate prepared.
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
        self.in_flight = InFlight()
        self.begun = self.used = False
        self._batches_given = self._given_before = 0
        self._began: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None
        # States of the global generators for batches that are read again after a restore.
        self._replayed_generators: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError if the loader has no length

    @property
    def sampler(self) -> Any:
        """The sampler of `loader`, or None; frameworks call its `set_epoch`."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of `loader`, or None."""
        return getattr(self.loader, "batch_sampler", None)

    @property
    def dataset(self) -> Any:
        """The dataset of `loader`, or None."""
        return getattr(self.loader, "dataset", None)

    def __iter__(self) -> Iterator[Any]:
        self.begun = False
        if self._loaded is None:
            self._forget_epoch()
            if not self.in_flight.reads_ahead:
                self.in_flight.forget()
        return self._epoch()

    @property
    def is_counted(self) -> bool:
        """Whether a framework counts the batches that are trained, or is told of each fetch."""
        return self.in_flight.is_counted or self.before_fetch is not None

    def count_consumed(self) -> None:
        """Count one batch as trained, in a training loop that reads batches ahead.

        If this is never called, all batches given out count as trained when `state_dict` is called.
        """
        self.expect_counts()
        self.in_flight.land()

    def expect_counts(self) -> None:
        """Count batches as trained only when `count_consumed` is called, from now on.

        Batches already read in this epoch do not count as trained.
        """
        if not self.in_flight.is_counted:
            self.in_flight.is_counted = True
            for _ in range(self._batches_given - self._given_before):
                self.in_flight.take(TakenBatch(None))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were trained.

        Raises:
            SettingsError: batches were read and not trained, and their positions were not kept.
        """
        if self._loaded is not None:
            return self._loaded
        ahead = len(self.in_flight)
        if not ahead:
            return self._here()
        position = self.in_flight.oldest.position
        if isinstance(position, Exception):
            raise position
        if position is None:
            raise SettingsError(
                "the training dataloader",
                found=f"{ahead} batches that were read and not trained, and whose positions were "
                "not kept",
                expected="a training loop that is known to read ahead before it does so",
                next_step="pass Checkpointer(options=Options(in_flight=N)), or have the framework "
                "read no batch ahead",
            )
        state = {**position, "then": rng.capture()}
        later_generators = [*self.in_flight.later_generators, *self._replayed_generators]
        return {**state, "fetches": later_generators} if later_generators else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position at the next `iter`.

        Args:
            state: the position that `state_dict` returned, in this or another process.
        """
        if isinstance(self.loader, Stateful) and state["own"] is not None:
            self.loader.load_state_dict(state["own"])
        self.in_flight.forget()
        self._replayed_generators.clear()
        self._loaded = self.resumed_from = state

    @staticmethod
    def decides_next_epoch(state: dict[str, Any]) -> bool:
        """Whether the batches of an epoch that begins at this position depend on the position.

        Args:
            state: the position, as `state_dict` returned it.
        """
        drawing = state.get("drawing")
        return state["own"] is not None or (drawing is not None and bool(drawing["states"]))

    def leave_behind(self, state: dict[str, Any]) -> None:
        """Begin the next epoch as it would begin after `state`, the end of an epoch.

        For frameworks that begin another epoch in this case, without `load_state_dict`.

        Args:
            state: the position, as `state_dict` returned it.
        """
        if isinstance(self.loader, Stateful) and state["own"] is not None:
            self.load_state_dict(state)
        elif state.get("drawing") is not None:
            restore(self.loader, state["drawing"])

    def _forget_epoch(self) -> None:
        self._batches_given, self._given_before, self._began = 0, 0, None

    def _here(self) -> dict[str, Any]:
        """Return the position after all batches that were given out."""
        now = rng.capture()
        if not self._replayed_generators:
            return self._place(now)
        fetch, *later_generators = self._replayed_generators
        state = {**self._place(fetch), "then": now}
        return {**state, "fetches": later_generators} if later_generators else state

    def _taken(self, state_asked: Mapping[str, Any] | None, *, is_first: bool) -> TakenBatch:
        """Return the batch that is about to be read, with its position if positions are kept.

        Args:
            state_asked: as `_asked` returned it.
            is_first: whether the loader was iterated since `state_asked`, and may have drawn then.
        """
        if state_asked is None:
            return TakenBatch(None)
        generators = state_asked if self.in_flight.is_asked_in_training else None
        try:
            return TakenBatch(self._place(rng.capture() if is_first else state_asked), generators)
        except Exception as error:  # raised by the user's loader
            if came_from_handler(error):
                raise
            return TakenBatch(error, state_asked)  # `state_dict` raises it if it is called

    def _place(self, fetch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the position; `fetch`: the generators that the next batch is read with."""
        # Copied, because the loader goes on before this is stored.
        own_state = (
            deepcopy(self.loader.state_dict()) if isinstance(self.loader, Stateful) else None
        )
        return {
            "own": own_state,
            "began": self._began,
            "then": None,
            # Needed if an epoch begins at this position:
            "keeps_workers": self._keeps_workers,
            "drawing": None if own_state is not None else capture(self.loader),
            "given": self._batches_given,
            "fetch": fetch,
        }

    def _epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch, which begins with its first batch and not with `iter`.

        A framework may call `iter` much earlier.
        """
        self._tell()
        self.begun = self.used = True
        models, is_asked = self._replay(), self._asked()
        batches, resumed = self._begin()
        is_first = True
        while True:
            if resumed is not None:
                # Restore the generators again: code that begins an epoch early, or looks at its
                # first batch, may have drawn from them since the restore.
                rng.restore(resumed["fetch"])
            self.in_flight.take(self._taken(is_asked, is_first=is_first))
            batch = self._fetch(batches)
            if resumed is not None and resumed["then"] is not None:
                rng.restore(resumed["then"])
                self._replayed_generators.extend(resumed.get("fetches", ()))
            elif models is not None:
                rng.restore(models)
                if batch is not self:
                    self._replayed_generators.popleft()
            resumed, is_first = None, False
            if batch is self:
                return
            self._batches_given += 1
            yield batch
            self._tell()
            models, is_asked = self._replay(), self._asked()

    def _fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, which is in flight already; or this loader, if there is none."""
        try:
            batch = next(batches, self)
        except BaseException:
            self.in_flight.drop_newest()
            raise
        if batch is self:
            self.in_flight.drop_newest()
            self.in_flight.has_ended = True
        return batch

    def _asked(self) -> dict[str, Any] | None:
        """Return the states of the generators now; None: the batch's position is not kept."""
        return rng.capture() if self._keeps_positions else None

    def _replay(self) -> dict[str, Any] | None:
        """Give the next batch the generators that it was first read with, if it is read again.

        Returns:
            The states of the generators before, which the model goes on with; None: nothing was
            changed.
        """
        if not self._replayed_generators:
            return None
        models = rng.capture()
        rng.restore(self._replayed_generators[0])
        return models

    def _begin(self) -> tuple[Iterator[Any], dict[str, Any] | None]:
        """Return the batches that are left of the epoch, and the loaded position, if any."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._forget_epoch()
            self._batches_given = self._given_before = loaded["given"]
        if isinstance(self.loader, Stateful):
            return iter(self.loader), loaded
        if loaded is not None and loaded["began"] is not None:
            if not self._is_left_behind(loaded):
                return self._skip(loaded), loaded
            self._forget_epoch()
            self._keep_workers(loaded.get("keeps_workers"))
            restore(self.loader, loaded["drawing"])
        elif loaded is not None:
            self._keep_workers(loaded.get("keeps_workers"))
            if loaded.get("drawing") is not None:
                restore(self.loader, loaded["drawing"])
            rng.restore(loaded["fetch"])
        self._began = self._generators()
        return iter(self.loader), None

    def _is_left_behind(self, loaded: dict[str, Any]) -> bool:
        """Whether the loaded epoch was trained to its end, and the script begins a later one.

        Otherwise, the loaded epoch yields no batch and ends. A script that counts epochs by
        `batches_done` does not expect this empty epoch, and would lose the epoch after it.
        """
        drawing = loaded["began"].get("drawing")
        if drawing is None or not is_told_later(self.loader, drawing):
            return False
        try:
            return bool(loaded["given"] >= len(self))
        except (TypeError, NotImplementedError):
            return False

    def _skip(self, loaded: dict[str, Any]) -> Iterator[Any]:
        """Begin the loaded epoch again, and drop the batches that were trained."""
        self._keep_workers(loaded["began"].get("kept_workers"))
        rng.restore(loaded["began"]["global"])
        drawing = loaded["began"].get("drawing")
        if drawing is None:  # written by an earlier release, with only the loader's own generator
            drawing = {"states": {"generator": loaded["began"]["own"]}, "epochs": {}}
        restore(self.loader, drawing)
        epochs = set_epochs(self.loader, drawing)
        if epochs is not None:
            _log.warning(
                "the training dataloader's sampler was set to epoch %d, but %d batches of epoch %d "
                "are trained, so that epoch goes on. Next: begin the loop over epochs with %d",
                epochs[0],
                loaded["given"],
                epochs[1],
                epochs[1],
            )
        self._began = self._generators()
        batches = iter(self.loader)
        for number in range(loaded["given"]):
            if next(batches, self) is self:
                raise SettingsError(
                    "the training dataloader",
                    found=f"{number} batches in the epoch",
                    expected=f"at least the {loaded['given']} that the checkpoint was trained on",
                    next_step="use the dataloader that the run was trained with",
                )
        return batches

    def _generators(self) -> dict[str, Any]:
        return {
            "global": rng.capture(),
            "drawing": capture(self.loader),
            "kept_workers": self._keeps_workers,
        }

    @property
    def _keeps_workers(self) -> bool:
        """Whether workers that already run serve the next epoch (`persistent_workers`).

        torch's DataLoader draws a seed if it starts workers, but not if it keeps them. With equal
        generators, the two epochs are therefore shuffled differently.
        """
        return isinstance(self.loader, DataLoader) and self.loader._iterator is not None

    def _keep_workers(self, keeps: bool | None) -> None:
        """Have workers that already run serve the next epoch, or new workers.

        Args:
            keeps: whether workers are kept; None: the checkpoint does not say, so change nothing.
        """
        if keeps is None or keeps == self._keeps_workers or not isinstance(self.loader, DataLoader):
            return
        if keeps:
            iter(self.loader)  # starts workers; the next `iter` drops the epoch that this begins
        else:
            self.loader._iterator = None

    @property
    def _keeps_positions(self) -> bool:
        """Whether the training loop reads ahead, or may: batches are counted without a length."""
        if self.in_flight.reads_ahead:
            return True
        if not self.in_flight.is_counted:
            return False
        try:
            len(self)
        except (TypeError, NotImplementedError):
            return True
        return False

    def _tell(self) -> None:
        if self.before_fetch is not None:
            self.before_fetch()
