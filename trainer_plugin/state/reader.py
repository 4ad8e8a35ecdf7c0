"""Asks readers of batches for their position; gives one to dataloaders that have none."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler, let_into
from recpoint.trainer_plugin.state import rng

__all__ = [
    "Divisible",
    "Passes",
    "ResumableLoader",
    "Stateful",
    "announce",
    "capture",
    "refuse_prepared",
    "tell_epoch",
]


# The random generators that a dataloader, its samplers and its dataset draw from.


_log = logging.getLogger("recpoint")

#: Where the parts of a loader are: samplers may wrap samplers, and datasets other datasets.
_PARTS = ("sampler", "batch_sampler", "dataset")
_MAX_PARTS = 32


def capture(loader: object) -> dict[str, Any]:
    """The states of its own generators, and the epochs that its samplers are in.

    The global generators are captured in `rng`. What workers draw from are copies, which nobody
    sees.
    """
    return {
        "states": {name: _state(generator) for name, generator in _generators(loader)},
        "epochs": {place: part.epoch for place, part in _with_epoch(loader)},
    }


def restore(loader: object, saved: Mapping[str, Any]) -> None:
    """Put the states back, each where `capture` found it; what is gone is passed over.

    So is what is of another kind by now, with a warning.
    """
    states = saved["states"]
    for name, generator in _generators(loader):
        if states.get(name) is None:
            continue
        try:
            _set_state(generator, states[name])
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            _log.warning(
                "the training dataloader's generator %s goes on as the script made it, and the "
                "batches that it draws will differ: it is a %s, and the checkpoint's was of "
                "another kind (%s). Next: give the generator that the run was trained with",
                name,
                type(generator).__qualname__,
                error,
            )


def set_epochs(loader: object, saved: Mapping[str, Any]) -> tuple[int, int] | None:
    """Have the samplers be in the epochs in which `capture` found them.

    Returns:
        Of one that was told to be in another: which, and the one that it is in now.
    """
    changed = None
    for place, part in _with_epoch(loader):
        told, epoch = part.epoch, saved["epochs"].get(place, part.epoch)
        if told != epoch:
            part.set_epoch(epoch)
            changed = changed or (told, epoch)
    return changed


def is_told_later(loader: object, saved: Mapping[str, Any]) -> bool:
    """Whether a sampler is told to begin an epoch after that in which `capture` found it."""
    return any(
        part.epoch > saved["epochs"].get(place, part.epoch) for place, part in _with_epoch(loader)
    )


def _parts(loader: object) -> Iterator[tuple[str, object]]:
    """It and what it consists of, each once, by where it is."""
    found: dict[int, tuple[str, object]] = {}
    left: list[tuple[str, object]] = [("", loader)]
    while left and len(found) < _MAX_PARTS:
        place, part = left.pop(0)
        if part is None or id(part) in found:
            continue
        found[id(part)] = place, part
        left += [(f"{place}{name}.", _attributes(part).get(name)) for name in _PARTS]
    yield from found.values()


def _attributes(part: object) -> Mapping[str, Any]:
    """Its own attributes; asking a class for others may run whatever it likes."""
    found = getattr(part, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _generators(loader: object) -> Iterator[tuple[str, Any]]:
    """Each generator once, by where it is."""
    seen = set()
    for place, part in _parts(loader):
        # All at once: a dataset that reads ahead in a thread may come to others meanwhile.
        for name, value in list(_attributes(part).items()):
            if _is_generator(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{place}{name}", value


def _is_generator(value: object) -> bool:
    """Whether it is one whose state is known to be stored, and put back.

    What a class of somebody's own says of its state is not asked for: training waits, and would end
    with an error there, or no checkpoint could be stored.
    """
    if isinstance(value, random.Random):  # SystemRandom is one, and has no state
        kind = type(value)
        return (kind.getstate, kind.setstate) == (random.Random.getstate, random.Random.setstate)
    if isinstance(value, np.random.RandomState):  # it takes states of the first generator alone
        return isinstance(value._bit_generator, np.random.MT19937)
    if isinstance(value, np.random.Generator):
        return type(value.bit_generator).__module__.startswith("numpy.random.")
    return isinstance(value, torch.Generator)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        key = np.array(state["state"]["key"], dtype=np.uint32)
        generator.set_state({**state, "state": {**state["state"], "key": key}})
    else:
        generator.bit_generator.state = state


def _plain(value: Any) -> Any:
    """Words of generators as numbers: of arrays of uint64 the format knows nothing."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _with_epoch(loader: object) -> list[tuple[str, Any]]:
    return [
        (place, part)
        for place, part in _parts(loader)
        if part is not loader
        and isinstance(_attributes(part).get("epoch"), int)
        and callable(getattr(type(part), "set_epoch", None))
    ]


# What recpoint asks of a reader of training batches, and of other things with a state.
#
# A torchdata `StatefulDataLoader` fits as it is, with and without worker processes; what a dataset
# draws at random inside a worker is not part of its state, so seed such draws by the sample's
# index.


@runtime_checkable
class Stateful(Protocol):
    """A thing whose state is saved and restored: a reader, a metric, a gradient scaler.

    The state must consist of what format §3.4 can store: None, bool, int, float, str, bytes,
    tensors, numpy arrays, and lists, tuples and dicts of those.
    """

    def state_dict(self) -> Any:
        """The state right now: for a reader, after the batches that training has consumed.

        Rows of tables MUST stay as they are: other threads may be copying them already.
        """

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from a state that `state_dict` returned, in this or another process."""


@runtime_checkable
class BatchBudget(Protocol):
    """A reader that is told how far it may read ahead."""

    def batches_until_checkpoint(self, n: int, /) -> None:
        """No more than `n` further batches will be consumed before the reader is asked again.

        Called when training starts, after each checkpoint, and when more batches are granted
        before the next one: about eight times in an interval in seconds, which is granted in parts.
        A reader with workers stops after `n` batches, so that none is in flight when its state is
        taken.
        """


@runtime_checkable
class Divisible(Protocol):
    """A reader of one rank that can go on where readers of another number of ranks have stopped."""

    def load_state_dicts(self, states: Sequence[Any], rank: int, ranks: int, /) -> None:
        """Go on from what the readers of all ranks of a checkpoint returned, now as one of several.

        What the `ranks` readers then read, together, MUST be what the earlier ones had left: no
        sample lost, none twice.

        Args:
            states: of each rank of the checkpoint, in their order.
            rank: of this process.
            ranks: how many there are now; another number than of states.
        """


class Passes(NamedTuple):
    """How far training has gone through its reader; stored with the reader's position.

    A reader's position alone does not say which epoch it is in. Nor does it say whether the end of
    an epoch was reached or only its last batch, so that `batches` is stored too.

    Attributes:
        done: epochs that have ended.
        batches: of the epoch that goes on; 0: it has not begun.
    """

    done: int = 0
    batches: int = 0


def tell_epoch(reader: object, epoch: int) -> None:
    """Call `set_epoch(epoch)` of the reader, its samplers and its dataset, where they have it."""
    loader = reader.loader if isinstance(reader, ResumableLoader) else reader
    told: list[Any] = [reader] if loader is reader else [reader, loader]
    told += [part for _, part in _with_epoch(loader)]
    for part in told:
        if callable(getattr(type(part), "set_epoch", None)):
            part.set_epoch(epoch)


def announce(reader: object, n: int) -> bool:
    """Tell a reader that wants to know how many batches are left; whether it does."""
    if not isinstance(reader, BatchBudget):
        return False
    budget = reader  # narrowed
    let_into(lambda: budget.batches_until_checkpoint(n))
    return True


def refuse_prepared(subject: str, loader: object) -> None:
    """Refuse a loader whose `state_dict` is Accelerate's: that is no position.

    Over torch's DataLoader there is none to ask. Over a `StatefulDataLoader` neither the order of a
    shuffled epoch nor which epoch it is are in it: after a restore other samples come, unnoticed.

    Raises:
        SettingsError: it is one.
    """
    asked = getattr(type(loader), "state_dict", None)
    where = getattr(asked, "__module__", None) or ""  # what is compiled may have none
    if where.partition(".")[0] == "accelerate":
        raise SettingsError(
            subject,
            found=f"a {type(loader).__name__} of Accelerate's prepare(), whose state_dict() does "
            "not say which samples come next",
            expected="the loader that prepare() was given",
            next_step="give ResumableLoader(loader) as reader and leave prepare() out for it: move "
            "batches to accelerator.device, and of several processes give each a "
            "DistributedSampler, as examples/accelerate_loop.py says",
        )


# A position in the batches of a dataloader, to the batch, for loaders that have none.


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
        return {**self._before, "then": rng.capture()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position with the next `iter`.

        Args:
            state: what `state_dict` returned, in this or another process.
        """
        if isinstance(self.loader, Stateful) and state["own"] is not None:
            self.loader.load_state_dict(state["own"])
        self._loaded = self.resumed_from = state

    @staticmethod
    def decides_next_epoch(state: dict[str, Any]) -> bool:
        """Whether what an epoch gives that begins at this position follows from it.

        Args:
            state: the position, as `state_dict` returned it.
        """
        drawing = state.get("drawing")
        return state["own"] is not None or (drawing is not None and bool(drawing["states"]))

    def leave_behind(self, state: dict[str, Any]) -> None:
        """Begin the next epoch as it would begin after a position at the end of one.

        For frameworks that begin another epoch then, and do without `load_state_dict`.

        Args:
            state: the position, as `state_dict` returned it.
        """
        if isinstance(self.loader, Stateful) and state["own"] is not None:
            self.load_state_dict(state)
        elif state.get("drawing") is not None:
            restore(self.loader, state["drawing"])

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
        return {**self._place(), "given": self._given, "fetch": rng.capture()}

    def _place(self) -> dict[str, Any]:
        # Copied: the loader goes on before this is stored.
        own = deepcopy(self.loader.state_dict()) if isinstance(self.loader, Stateful) else None
        return {
            "own": own,
            "began": self._began,
            "then": None,
            # For an epoch that begins here:
            "keeps_workers": self._keeps_workers,
            "drawing": None if own is not None else capture(self.loader),
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
                rng.restore(resumed["fetch"])
            if self._may_be_ahead:
                self._before = self._now()
            batch = next(batches, self)
            if resumed is not None and resumed["then"] is not None:
                rng.restore(resumed["then"])
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
            restore(self.loader, loaded["drawing"])
        elif loaded is not None:
            self._keep_workers(loaded.get("keeps_workers"))
            if loaded.get("drawing") is not None:
                restore(self.loader, loaded["drawing"])
            rng.restore(loaded["fetch"])
        self._began = self._generators()
        return iter(self.loader), None

    def _is_left_behind(self, loaded: dict[str, Any]) -> bool:
        """Whether all of its epoch was trained, and the script begins with a later one.

        Else it gives nothing and ends, as the epoch that was going on when training ended. Who
        counts epochs by `batches_done` has none for that one, and would lose the one after it.
        """
        drawing = loaded["began"].get("drawing")
        if drawing is None or not is_told_later(self.loader, drawing):
            return False
        try:
            return bool(loaded["given"] >= len(self))
        except (TypeError, NotImplementedError):
            return False

    def _skip(self, loaded: dict[str, Any]) -> Iterator[Any]:
        """Begin the epoch as it was begun then, and drop the batches that were trained."""
        self._keep_workers(loaded["began"].get("kept_workers"))
        rng.restore(loaded["began"]["global"])
        drawing = loaded["began"].get("drawing")
        if drawing is None:  # of an earlier release, with the loader's own generator alone
            drawing = {"states": {"generator": loaded["began"]["own"]}, "epochs": {}}
        restore(self.loader, drawing)
        told = set_epochs(self.loader, drawing)
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
            "global": rng.capture(),
            "drawing": capture(self.loader),
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
