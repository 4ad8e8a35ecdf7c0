"""Reads batches ahead of training, so that their rows are known before they change.

The state of a reader that is ahead of training is of no use to a checkpoint. `Lookahead` therefore
keeps states of the reader from some batches ago, its *anchors*. A restore loads the newest anchor
that is not after the batch that training is at, and reads forward from there.

Reads ahead come at other moments than reads without Lookahead. Whatever they draw from global
generators would change what the model draws. They therefore draw from generators of their own,
whose states belong to the position of the reader.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from recpoint.embeddings.cache.reader_plans import PlannedCache, planned_cache
from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.setting_checks import checked_whole
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.batch_ids import Ids, bytes_of, check_names, ids_of, tables_of
from recpoint.trainer_plugin.state.in_flight import InFlight, TakenBatch
from recpoint.trainer_plugin.state.reader import (
    Divisible,
    ResumableLoader,
    Stateful,
    announce,
    capture,
    refuse_prepared,
    set_epochs,
    tell_epoch,
)

__all__ = [
    "Lookahead",
    "fetched_batches",
    "goes_forward",
    "is_divisible",
    "load_divided",
    "load_without",
    "was_ahead",
    "without_lookahead",
]


_log = logging.getLogger("recpoint")

_MARK: Final = "lookahead"
_VERSION: Final = 1
_KEYS: Final = {_MARK, "reader", "forward", "generators"}

#: A state of the reader is kept once in this many batches.
_STRIDE: Final = 16
_MOST_WINDOW: Final = 1_000_000
#: Rows of a cache are fetched for the nearer half of the window, and for so many batches at least.
_LEAST_FETCHED: Final = 16
_END: Final[Any] = object()


# The stored state.
def was_ahead(state: object) -> bool:
    """Whether a reader's state is one that `Lookahead.state_dict` returned."""
    return isinstance(state, Mapping) and _MARK in state and state.keys() >= _KEYS


def goes_forward(state: object) -> bool:
    """Whether batches must be read and dropped after the reader has loaded the state."""
    return was_ahead(state) and bool(state["forward"])  # type: ignore[index]


def without_lookahead(state: Any) -> Any:
    """Return the state of the reader inside, if the state is a Lookahead's."""
    return state["reader"] if was_ahead(state) else state


def is_divisible(reader: object) -> bool:
    """Whether the reader, or the one inside a Lookahead, is `Divisible`."""
    return isinstance(reader.reader if isinstance(reader, Lookahead) else reader, Divisible)


def load_divided(reader: Any, states: Sequence[Any], rank: int, ranks: int) -> None:
    """Have a divisible reader go on from the states of another number of ranks.

    Args:
        reader: a reader for which `is_divisible` is true.
        states: state of the reader of each rank of the checkpoint, in rank order. None of them
            `goes_forward`.
        rank, ranks: as for `Divisible.load_state_dicts`.
    """
    plain = [without_lookahead(state) for state in states]
    if isinstance(reader, Lookahead):
        reader.load_divided(plain, rank, ranks)
    else:
        reader.load_state_dicts(plain, rank, ranks)


def load_without(reader: Any, state: Mapping[str, Any]) -> None:
    """Load a Lookahead's state into a reader without Lookahead, to the batch.

    The reader's own generators become the global ones, because the reader draws from these now.
    Call it after the global generators were restored. Those of GPUs stay as they are.

    Args:
        reader: the reader; it is iterable if the state `goes_forward`.
        state: as `Lookahead.state_dict` returned it.

    Raises:
        SettingsError: the reader has fewer batches left than must be read.
    """
    _check_version(state)
    gpus = rng.capture()["cuda"]

    def put(generators: Mapping[str, Any]) -> None:
        rng.restore({**generators, "cuda": gpus})

    def load(inner: Any, generators: Mapping[str, Any]) -> None:
        put(generators)
        reader.load_state_dict(inner)
        reader.state_dict()  # starts a lazy reader, as TrainingState.restore does
        put(generators)

    generators = state["generators"]
    load(deepcopy(state["reader"]), generators)
    if state["forward"]:
        _drop(iter(reader), state["forward"])
        generators = rng.capture_cpu()
        # The GPUs' generators are put back first, because the reader may store them.
        put(generators)
        load(deepcopy(reader.state_dict()), generators)
    _log.warning(
        "the checkpoint's reader was in a Lookahead, and this reader is not. It goes on with the "
        "same batch. The global generators of Python, numpy and torch get the states of the "
        "reader's own generators, so what the model draws differs from an uninterrupted run. Next: "
        "pass reader=recpoint.Lookahead(reader), unless this is intended"
    )


def _check_version(state: Mapping[str, Any]) -> None:
    if state[_MARK] != _VERSION:
        raise SettingsError(
            "the checkpoint's reader state",
            found=f"version {state[_MARK]!r:.20} of a Lookahead's state",
            expected=f"version {_VERSION}",
            next_step="restore with the release of recpoint that wrote the checkpoint, or newer",
        )


def _drop(batches: Iterator[Any], count: int) -> None:
    """Read so many batches that were trained, and drop them."""
    for number in range(count):
        if next(batches, _END) is _END:
            raise SettingsError(
                "the reader",
                found=f"{number} batches after the position that it has loaded",
                expected=f"at least the {count} that the checkpoint was trained on",
                next_step="use the reader that the run was trained with",
            )


def fetched_batches(window: int) -> int:
    """Return for how many of the batches that are held rows are fetched into a cache."""
    return min(window + 1, max(_LEAST_FETCHED, window // 2))


class _Anchor(NamedTuple):
    """A state of the reader inside.

    Attributes:
        position: number of batches read before, counted from the last `load_state_dict`.
        state: the state, or the error of the reader's `state_dict`.
        generators: states of the reader's generators at the position.
        reads: number of batches to read before the next anchor.
    """

    position: int
    state: Any
    generators: dict[str, Any]
    reads: int


@dataclass
class _HeldBatch:
    """A batch that was read and not handed out.

    Attributes:
        batch: the batch.
        ids: table name -> ids [number of ids]; None: the tables are not known yet.
        bytes: bytes of the batch.
    """

    batch: Any
    ids: dict[str, Tensor] | None
    bytes: int


class Lookahead:
    """Makes a reader read ahead of training, so that the rows of coming batches are known.

        reader = recpoint.Lookahead(reader, ids=lambda batch: {"tables.user": batch.user})
        with Checkpointer(model, optimizers, run=URL, reader=reader, interval_batches=1000) as ckpt:
            ckpt.restore()
            for batch in ckpt.batches(epochs=3):
                ...

    The Checkpointer can then copy rows before a checkpoint is due, because it knows which rows the
    batches until then will change.

    If tables are in a cache (`recpoint.embeddings.cached`), the rows of coming batches are brought
    from their home, and a batch is handed out once its rows are there.

    For each batch that is handed out at most two are read, in the same thread, until `window`
    batches are held. No read goes beyond the end of an epoch. An error of the reader is raised at
    the batch that it belongs to.

    The state is that of the batch that training is at, wherever the reader itself is: the reader's
    state of some batches ago, and how many batches are to be read from there, at most 15. A restore
    reads these and drops them. The window may be another one then, or the reader may be in no
    Lookahead.

    While the reader reads, generators of its own are in place of the global generators of Python,
    numpy and torch's CPU. Therefore a reader that draws does not change what the model draws,
    however far ahead it is. They are seeded from the states of the global generators when this
    object is built, so seed these before. A reader MUST NOT draw from generators of GPUs, which are
    not replaced, nor from a generator that the model draws from. It MUST NOT change a batch that it
    has yielded.

    If you iterate again before an epoch has ended, the epoch that then begins is the one that would
    begin without reads ahead. A reader that is its own iterator goes on instead, as it does without
    Lookahead.

    Args:
        reader: the reader: a torchdata `StatefulDataLoader`, a `ResumableLoader`, or any other
            iterable of batches with `state_dict` and `load_state_dict`. A `Divisible` one is asked
            for its state at each batch.
        model: the model, so that names of tables are checked before a Checkpointer is built. None:
            they are checked when a Checkpointer is built.
        ids: returns the ids that a batch looks up: table name -> int32 or int64, any shape, on the
            CPU. Names are those of the embedding modules, as in `model.named_modules()`. None: the
            batch is a mapping; keys that name tables have the ids, and other keys are ignored. Ids
            are hints: ids that are missing or out of range cost time, not correctness.
        window: number of batches to hold, 1 to 1,000,000.

    Attributes:
        reader: the reader inside.
        window: number of batches to hold.
        before_fetch: if set, called each time before a batch is handed out.
        in_flight: the batches that were handed out and not trained, if these are counted.
        begun: whether a batch has been asked for since the last `iter`.

    Raises:
        SettingsError: the reader cannot be read ahead: it has no `state_dict`, is not iterable, was
            prepared by Accelerate, is a Lookahead, or is a `ResumableLoader` whose batches
            Lightning counts; or another argument is not valid. While batches are read: for ids as
            described above, at the batch that they belong to.
    """

    def __init__(
        self,
        reader: Any,
        model: nn.Module | None = None,
        *,
        ids: Ids | None = None,
        window: int = 200,
    ) -> None:
        _refuse(reader)
        if ids is not None and not callable(ids):
            raise SettingsError(
                "Lookahead(ids=...)",
                found=f"{ids!r:.200}",
                expected="a function from a batch to its ids by table name, or None",
                next_step="pass ids=lambda batch: {name: tensor}",
            )
        self.reader = reader
        self.window = checked_whole("Lookahead.window", window, 1, _MOST_WINDOW)
        self.before_fetch: Callable[[], None] | None = None
        self.in_flight = InFlight()
        self.begun = False
        self._ids = ids
        self._tables = None if model is None else tables_of(model)
        self._cache: PlannedCache | None = None if model is None else planned_cache(model)
        self._own_generators = rng.OwnGenerators()
        self._follows_global = False
        self._told_epoch: int | None = None
        self._loaded: dict[str, Any] | None = None  # until the first batch after it is handed out
        self._is_touched = False  # the reader was iterated since it has loaded that
        self._forget()

    def _forget(self) -> None:
        """Forget the open epoch and what is held of it."""
        if self._cache is not None:
            self._cache.forget()
        self._held_batches: deque[_HeldBatch] = deque()
        self._held_bytes = 0
        self._anchors: deque[_Anchor] = deque()
        # Positions: number of batches since the last load_state_dict.
        self._batches_given = self._read = 0
        self._batches: Iterator[Any] | None = None  # the open epoch of the reader inside
        self._open: _Epoch | None = None  # the iterator that this epoch is handed out by
        self._is_new = True  # no batch of the epoch was handed out
        self._state_before: dict[str, Any] | Exception | None = None  # the state until that
        self._last: Any = None  # follows the batches that are held: `_END`, or an error
        self._is_torn = False  # a read has failed since the last anchor
        self._epochs: dict[str, Any] = {"epochs": {}}

    def __len__(self) -> int:
        return len(self.reader)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over an epoch of the reader; it begins with its first batch."""
        if not self.in_flight.reads_ahead:
            self.in_flight.forget()
        self.begun = False
        return _Epoch(self)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the reader, its samplers and its dataset, if they have it.

        Call it between epochs.

        Args:
            epoch: number of the epoch that begins next.
        """
        self._told_epoch = epoch
        tell_epoch(self.reader, epoch)

    # For the Checkpointer.

    def attach(self, tables: Mapping[str, int], cache: PlannedCache | None = None) -> None:
        """Take the tables of the model; a Checkpointer calls it when it is built.

        Args:
            tables: table name -> number of rows of the whole table.
            cache: plans the batches that are read for tables in a cache; None: none is.

        Raises:
            SettingsError: a batch that is held has ids of a table that does not exist, or its ids
                are not valid.
        """
        self._tables = dict(tables)
        self._cache = cache
        for batch in self._held_batches:
            if batch.ids is None:
                self._find_ids(batch)
            else:
                check_names(batch.ids, self._tables)

    @property
    def held(self) -> int:
        """Number of batches that were read and not handed out yet."""
        return len(self._held_batches)

    @property
    def held_bytes(self) -> int:
        """Bytes of the batches that are held, and of their ids, as far as they can be counted."""
        return self._held_bytes

    def coming(self, n: int) -> tuple[Mapping[str, Tensor], ...]:
        """Return the ids of the batches that are handed out next.

        Args:
            n: number of batches, 0 to `held`.

        Returns:
            For each batch, in order: table name -> ids, int32 or int64 [number of ids], contiguous,
            on the CPU. They may share memory with the batch. Ids may be out of range.

        Raises:
            ValueError: fewer than `n` batches are held.
            SettingsError: the names of tables are not known: neither a model nor a Checkpointer was
                given, and batches are mappings.
        """
        if not 0 <= n <= len(self._held_batches):
            raise ValueError(f"{n} batches are asked for, and {len(self._held_batches)} are held")
        coming_ids = []
        for batch in islice(self._held_batches, n):
            if batch.ids is None:
                raise SettingsError(
                    "Lookahead.coming()",
                    found="no names of tables",
                    expected="names, to find the ids in batches that are mappings",
                    next_step="pass the Lookahead to a Checkpointer, or a model to the Lookahead",
                )
            coming_ids.append(batch.ids)
        return tuple(coming_ids)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were trained.

        Batches that were handed out count as trained, except those in `in_flight`.

        Returns:
            `lookahead`: 1; `reader`: a state of the reader inside; `forward`: number of batches to
            read from there, 0 to 15; `generators`: states of the reader's own generators there.
        """
        if not self.in_flight:
            return self._position()
        position = self.in_flight.oldest.position
        if isinstance(position, Exception):
            raise position
        state: dict[str, Any] = position
        return state

    def _position(self) -> dict[str, Any]:
        """Return the position after the batches that were handed out."""
        position = self._state_before if self._loaded is None else self._loaded
        if isinstance(position, Exception):
            raise position
        if position is not None:
            return position
        anchor = next(
            (
                anchor
                for anchor in reversed(self._anchors)
                if anchor.position <= self._batches_given
            ),
            None,
        )
        is_here = self._read == self._batches_given and self._last is None and not self._is_torn
        if anchor is None or (is_here and anchor.position < self._batches_given):
            return self._here()
        if isinstance(anchor.state, Exception):
            raise anchor.state
        return _form(anchor.state, self._batches_given - anchor.position, anchor.generators)

    def _here(self) -> dict[str, Any]:
        """Return the position of the reader."""
        # Copied, because the reader goes on before this is stored.
        return self._own_generators.run_beside_gpus(
            lambda: _form(deepcopy(self.reader.state_dict()), 0, rng.capture_cpu())
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from a position; batches are read forward when the first batch is asked for.

        Args:
            state_dict: as `state_dict` returned it, in this or another process; or a state of the
                reader without Lookahead. The reader's own generators then begin as the global
                generators are.
        """
        ahead = was_ahead(state_dict)
        if ahead:
            _check_version(state_dict)
        self.in_flight.forget()
        self._forget()
        self._told_epoch = None
        self._follows_global = not ahead
        generators = state_dict["generators"] if ahead else rng.capture_cpu()
        inner = without_lookahead(state_dict)
        self._load(inner, generators)
        self._loaded = _form(inner, state_dict["forward"] if ahead else 0, generators)

    def load_divided(self, states: Sequence[Any], rank: int, ranks: int) -> None:
        """Go on where readers of another number of ranks stopped.

        The reader inside must be `Divisible`. Its own generators begin as the global ones are.

        Args:
            states: as for `Divisible.load_state_dicts`.
            rank: as there.
            ranks: as there.
        """
        self.in_flight.forget()
        self._forget()
        self._told_epoch = self._loaded = None
        self._own_generators.run_beside_gpus(
            lambda: self.reader.load_state_dicts(states, rank, ranks)
        )
        self._follow_global()
        self._follows_global = True

    def generators_restored(self) -> None:
        """Take note that the global generators were restored, after the reader's state.

        If the checkpoint was taken without Lookahead, the reader's own generators begin as these.
        """
        if self._follows_global:
            self._follow_global()
            self._follows_global = False

    def _follow_global(self) -> None:
        """Set the reader's own generators to the states that the global ones have now."""
        generators = rng.capture_cpu()
        self._own_generators.restore(generators)
        if self._loaded is not None:
            self._loaded = {**self._loaded, "generators": generators}

    def _load(self, state: Any, generators: Mapping[str, Any]) -> None:
        def load() -> None:
            self.reader.load_state_dict(deepcopy(state))
            # A lazy reader (torchdata's loader) draws when it starts its iterator; it does now.
            self.reader.state_dict()

        self._own_generators.restore(generators)
        self._own_generators.run_beside_gpus(load)
        self._own_generators.restore(generators)
        self._is_touched = False

    # Reading.

    def _next(self, epoch: _Epoch) -> Any:
        if self.before_fetch is not None:
            self.before_fetch()
        self.begun = True
        if self._cache is not None:
            self._refuse_in_flight()
            self._cache.end_batch()
        if self._open is not epoch:
            self._turn_to(epoch)
        if self._is_new:
            # One only: after it the reader is exactly where training is, and its state is taken
            # inside the epoch. A state from before an epoch may begin another one.
            if not self._held_batches and self._last is None:
                # Beside GPUs, because the reader may go on from a loaded state.
                self._own_generators.run_beside_gpus(self._read_one)
                self._epochs = capture(self._inside)
        elif self._has_room:
            self._own_generators.run(self._read_two)
        if self._cache is not None:
            self._cache.plan(
                [batch.ids or {} for batch in self._held_batches],
                fetched=fetched_batches(self.window),
                window=self.window,
            )
        return self._hand_out()

    def _refuse_in_flight(self) -> None:
        """Refuse to hand out a batch while another one is in flight: a cache has rows of one.

        Raises:
            SettingsError: the training loop reads ahead.
        """
        if self.in_flight:
            raise SettingsError(
                "Lookahead(reader)",
                found="a batch that was handed out and not trained, and tables in a cache, which "
                "holds the rows of one batch for training",
                expected="a training loop that trains each batch before it takes the next",
                next_step="train without a prefetcher or a pipeline: the Lookahead itself reads "
                "ahead and fetches rows before their batch",
            )

    @property
    def _has_room(self) -> bool:
        """Whether another batch may be read, before one is handed out."""
        return self._last is None and len(self._held_batches) <= self.window

    def _hand_out(self) -> Any:
        if self._held_batches:
            if self._cache is not None:
                self._cache.begin_batch()
            self.in_flight.take(self._taken())
            batch = self._held_batches.popleft()
            self._held_bytes -= batch.bytes
            self._batches_given += 1
            self._is_new = False
            self._loaded = self._state_before = None
            # Keep the newest anchor before the position too: `_rewind` needs it.
            while len(self._anchors) > 1 and self._anchors[1].position < self._batches_given:
                self._anchors.popleft()
            return batch.batch
        last, self._last = self._last, None
        if last is _END:
            self.in_flight.has_ended = True
            self._anchors.clear()
            self._batches = self._open = self._loaded = self._state_before = None
            self._is_torn = False
            raise StopIteration
        self._is_torn = True
        try:
            raise last
        finally:
            del last  # its traceback refers to this frame: a cycle

    def _taken(self) -> TakenBatch:
        """Return the batch that is about to be handed out, with its position if it is kept."""
        if not self.in_flight.reads_ahead:
            return TakenBatch(None)
        try:
            return TakenBatch(self._position())
        except Exception as error:  # raised by the user's reader
            if came_from_handler(error):
                raise
            return TakenBatch(error)  # `state_dict` raises it if it is called

    def _turn_to(self, epoch: _Epoch) -> None:
        """Hand out by another iterator from now on: begin an epoch, if the reader does then."""
        if epoch.is_begun and not isinstance(self.reader, Iterator):
            raise SettingsError(
                "an iterator of a Lookahead",
                found="a call after another epoch has begun, or a state was loaded",
                expected="one iterator at a time",
                next_step="iterate the Lookahead again",
            )
        if self._batches is None or not isinstance(self.reader, Iterator):
            self._begin()
        self._open, epoch.is_begun = epoch, True

    def _begin(self) -> None:
        _refuse_counted(self.reader)
        if self._loaded is None and self._held_batches and self._state_before is not None:
            # No batch of the open epoch was handed out, because rows of the first did not come.
            if isinstance(self._state_before, Exception):
                raise self._state_before
            self._loaded = self._state_before
        loaded = self._loaded
        if loaded is None:
            if self._batches is not None:
                self._rewind()
            self._state_before = self._now()
        elif self._is_touched:  # no batch was handed out since the load: repeat it
            self._forget()
            self._load(loaded["reader"], loaded["generators"])
        self._is_touched, self._told_epoch = True, None
        forward = 0 if loaded is None else loaded["forward"]
        batches = self._iterate(
            forward, reads=forward + 1, generators=loaded and loaded["generators"]
        )
        self._batches, self._is_new, self._is_torn = batches, True, False

    def _rewind(self) -> None:
        """Bring the reader back to where training is, because training leaves the epoch there.

        At least one batch is read after the load, so that the next `iter` begins an epoch instead
        of going on with the loaded one.
        """
        is_here = self._read == self._batches_given and self._last is None
        if not is_here:
            anchor = next(
                anchor
                for anchor in reversed(self._anchors)
                if anchor.position < self._batches_given
            )
            if isinstance(anchor.state, Exception):
                raise anchor.state
            now, forward = capture(self._inside), self._batches_given - anchor.position
            # The script may have told the samplers the next epoch.
            set_epochs(self._inside, self._epochs)
            self._load(anchor.state, anchor.generators)
            self._iterate(forward, reads=forward, generators=anchor.generators)
            set_epochs(self._inside, now)
            if self._told_epoch is not None:
                tell_epoch(self.reader, self._told_epoch)
        epochs = self._told_epoch
        self._forget()
        self._told_epoch = epochs

    def _iterate(
        self, forward: int, *, reads: int, generators: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        """Iterate the reader.

        Args:
            forward: number of batches to read and drop.
            reads: number of batches that are read before the reader's state is next taken.
            generators: states of the reader's generators at the position that it has loaded.
        """

        def begin() -> Iterator[Any]:
            announce(self.reader, reads)
            return iter(self.reader)

        batches = self._own_generators.run_beside_gpus(begin)
        if forward:
            assert generators is not None  # a state was loaded
            # The reader did not begin to iterate at that position, so it drew nothing for that.
            self._own_generators.restore(generators)
            self._own_generators.run_beside_gpus(lambda: _drop(batches, forward))
        return batches

    def _now(self) -> dict[str, Any] | Exception:
        """Return the position of the reader, or its error, which `state_dict` raises if called."""
        try:
            return self._here()
        except Exception as error:  # raised by the user's reader
            if came_from_handler(error):
                raise
            return error

    @property
    def _inside(self) -> object:
        """The loader that has samplers and a dataset."""
        return self.reader.loader if isinstance(self.reader, ResumableLoader) else self.reader

    def _read_two(self) -> None:
        self._read_one()
        if self._has_room:
            self._read_one()

    def _read_one(self) -> None:
        """Read a batch. Its own generators are in place.

        What it raises is kept for its own batch, unless a signal handler raised it.
        """
        assert self._batches is not None  # an epoch is open
        try:
            if not self._is_new:
                self._take_anchor()
            batch = next(self._batches, _END)
            if batch is _END:
                self._last = _END
                return
            held_batch = _HeldBatch(batch, None, 0)
            self._find_ids(held_batch)
        except Exception as error:
            self._is_torn = True
            if came_from_handler(error):
                raise
            self._last = error
            return
        except BaseException:
            self._is_torn = True
            raise
        self._held_batches.append(held_batch)
        self._held_bytes += held_batch.bytes
        self._read += 1

    def _find_ids(self, batch: _HeldBatch) -> None:
        if self._ids is not None or self._tables is not None:
            batch.ids = ids_of(batch.batch, self._ids, self._tables)
        batch.bytes = bytes_of(batch.batch, batch.ids or {})

    def _take_anchor(self) -> None:
        """Keep the reader's state, if it is due."""
        newest = self._anchors[-1] if self._anchors else None
        is_due = newest is None or self._read - newest.position >= newest.reads
        if not (is_due or self._is_torn):
            return
        state: Any
        try:
            # Copied, because the reader goes on before this is stored.
            state = deepcopy(self.reader.state_dict())
        except Exception as error:  # kept until a checkpoint needs the state
            if came_from_handler(error):
                raise
            state = error
        reads = self._reads_until_next(state)
        self._anchors.append(_Anchor(self._read, state, rng.capture_cpu(), reads))
        self._is_torn = False
        announce(self.reader, reads)

    def _reads_until_next(self, state: Any) -> int:
        if isinstance(self.reader, Divisible):
            return 1  # its state must be exact, because it may be divided
        if isinstance(self.reader, ResumableLoader) and isinstance(state, Mapping):
            # The last batch of an epoch has an anchor of its own: by the position, the loader tells
            # that the epoch is over.
            try:
                reads_left = len(self.reader) - state["given"]
            except (TypeError, NotImplementedError):
                return _STRIDE
            return min(_STRIDE, reads_left) if reads_left > 0 else _STRIDE
        return _STRIDE


class _Epoch:
    """An iterator over one epoch of a Lookahead."""

    def __init__(self, ahead: Lookahead) -> None:
        self._ahead = ahead
        self.is_begun = self._is_over = False

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        try:
            return self._ahead._next(self)
        except StopIteration:
            self._is_over = True
            raise


def _form(state: Any, forward: int, generators: Mapping[str, Any]) -> dict[str, Any]:
    return {_MARK: _VERSION, "reader": state, "forward": forward, "generators": generators}


def _refuse(reader: object) -> None:
    """Refuse what cannot be read ahead without changing results."""
    subject = "Lookahead(reader)"
    if isinstance(reader, Lookahead):
        raise SettingsError(
            subject,
            found="a Lookahead",
            expected="the reader inside it",
            next_step="wrap the reader once",
        )
    refuse_prepared(subject, reader)
    if not isinstance(reader, Stateful):
        raise SettingsError(
            subject,
            found=f"a {type(reader).__name__} without state_dict and load_state_dict, so batches "
            "that are read ahead would be lost in a restart",
            expected="a reader with both methods",
            next_step="pass Lookahead(recpoint.ResumableLoader(loader)), or give the reader the "
            "two methods",
        )
    if not isinstance(reader, Iterable):
        raise SettingsError(
            subject,
            found=f"a {type(reader).__name__} that is not iterable",
            expected="an iterable of batches",
            next_step="wrap the object that the training loop takes batches from",
        )
    _refuse_counted(reader)


def _refuse_counted(reader: object) -> None:
    if isinstance(reader, ResumableLoader) and reader.is_counted:
        raise SettingsError(
            "Lookahead(reader)",
            found="a ResumableLoader whose batches a framework counts, as Lightning does for "
            "recpoint.LightningCallback",
            expected="a reader that only the Lookahead takes batches from",
            next_step="pass the ResumableLoader to Lightning without a Lookahead, or write the "
            "training loop with recpoint.Checkpointer",
        )
