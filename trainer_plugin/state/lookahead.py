"""Reads batches ahead of training, so that their rows are known before they change.

The state of a reader that is ahead of training is of no use to a checkpoint. `Lookahead` therefore
keeps states of the reader from some batches ago, its *anchors*. A restore loads the newest anchor
that is not after the batch that training is at, and reads forward from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from recpoint.embeddings.cache.reader_plans import PlannedCache, planned_cache
from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.setting_checks import checked_whole
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.anchors import Anchors
from recpoint.trainer_plugin.state.batch_ids import Features, Ids, tables_of
from recpoint.trainer_plugin.state.held_batches import HeldBatches
from recpoint.trainer_plugin.state.in_flight import InFlight, TakenBatch
from recpoint.trainer_plugin.state.loader_parts import capture, set_epochs
from recpoint.trainer_plugin.state.lookahead_state import (
    ahead_state,
    check_version,
    was_ahead,
    without_lookahead,
)
from recpoint.trainer_plugin.state.reader import (
    Divisible,
    ResumableLoader,
    Stateful,
    refuse_prepared,
    tell_epoch,
)
from recpoint.trainer_plugin.state.reader_inside import ReaderInside

__all__ = ["Lookahead", "fetched_batches", "is_divisible", "load_divided"]

_MOST_WINDOW: Final = 1_000_000
#: Rows of a cache are fetched for the nearer half of the window, and for so many batches at least.
_LEAST_FETCHED: Final = 16
_END: Final[Any] = object()


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


def fetched_batches(window: int) -> int:
    """Return for how many of the batches that are held rows are fetched into a cache."""
    return min(window + 1, max(_LEAST_FETCHED, window // 2))


class Lookahead:
    """Makes a reader read ahead of training, so that the rows of coming batches are known.

        reader = recpoint.Lookahead(reader, ids=lambda batch: {"tables.user": batch.user})
        with Checkpointer(model, optimizers, run=URL, reader=reader, interval_batches=1000) as ckpt:
            ckpt.restore()
            for batch in ckpt.batches(epochs=3):
                ...

    The Checkpointer can then copy rows before a checkpoint is due, because it knows which rows the
    batches until then will change. With several ranks, the reader of each is a Lookahead with the
    same window.

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
            CPU. Names are those of the embedding modules, as in `model.named_modules()`; TorchRec's
            are named as before they were sharded. None: if the batch is a mapping, keys that name
            tables have the ids; and so have the features of TorchRec's tables in each
            KeyedJaggedTensor of the batch. All else is ignored. Ids are hints: ids that are missing
            or out of range cost time, not correctness.
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
        self._held_batches = HeldBatches(ids, None if model is None else tables_of(model))
        self._anchors = Anchors(reader)
        self._inside = ReaderInside(reader)
        self._cache: PlannedCache | None = None if model is None else planned_cache(model)
        self._follows_global = False
        self._told_epoch: int | None = None
        self._loaded: dict[str, Any] | None = None  # until the first batch after it is handed out
        self._forget()

    def _forget(self) -> None:
        """Forget the open epoch and what is held of it."""
        if self._cache is not None:
            self._cache.forget()
        self._held_batches.forget()
        self._anchors.forget()
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
        return _Epoch(self._next)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the reader, its samplers and its dataset, if they have it.

        Call it between epochs.

        Args:
            epoch: number of the epoch that begins next.
        """
        self._told_epoch = epoch
        tell_epoch(self.reader, epoch)

    # For the Checkpointer.

    def attach(
        self,
        tables: Mapping[str, int],
        cache: PlannedCache | None = None,
        features: Features | None = None,
    ) -> None:
        """Take the tables of the model; a Checkpointer calls it when it is built.

        Args:
            tables: table name -> number of rows of the whole table.
            cache: plans the batches that are read for tables in a cache; None: none is.
            features: feature of a KeyedJaggedTensor -> tables that its values look up.

        Raises:
            SettingsError: a batch that is held has ids of a table that does not exist, or its ids
                are not valid.
        """
        self._cache = cache
        self._held_batches.attach(tables, features or {})

    @property
    def held(self) -> int:
        """Number of batches that were read and not handed out yet."""
        return len(self._held_batches)

    @property
    def held_bytes(self) -> int:
        """Bytes of the batches that are held, and of their ids, as far as they can be counted."""
        return self._held_batches.size_bytes

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
        return self._held_batches.coming(n)

    @property
    def untrained(self) -> int:
        """Number of batches that were read and are not trained."""
        return len(self.in_flight) + self.held

    def next_ids(self, n: int) -> list[Mapping[str, Tensor]]:
        """Return the ids of the `n` batches that are trained next, or of fewer, as for `coming`.

        A pipeline may have taken some of them already.
        """
        return [*self.in_flight.ids, *self._held_batches.ids][:n]

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
        anchor = self._anchors.newest(self._batches_given)
        is_here = self._read == self._batches_given and self._last is None and not self._is_torn
        if anchor is None or (is_here and anchor.position < self._batches_given):
            return self._inside.state()
        return ahead_state(anchor.state, self._batches_given - anchor.position, anchor.generators)

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from a position; batches are read forward when the first batch is asked for.

        Args:
            state_dict: as `state_dict` returned it, in this or another process; or a state of the
                reader without Lookahead. The reader's own generators then begin as the global
                generators are.
        """
        ahead = was_ahead(state_dict)
        if ahead:
            check_version(state_dict)
        self.in_flight.forget()
        self._forget()
        self._told_epoch = None
        self._follows_global = not ahead
        generators = state_dict["generators"] if ahead else rng.capture_cpu()
        inner = without_lookahead(state_dict)
        self._inside.load(inner, generators)
        self._loaded = ahead_state(inner, state_dict["forward"] if ahead else 0, generators)

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
        self._inside.load_divided(states, rank, ranks)
        self._follows_global = True

    def generators_restored(self) -> None:
        """Take note that the global generators were restored, after the reader's state.

        If the checkpoint was taken without Lookahead, the reader's own generators begin as these.
        """
        if self._follows_global:
            self._follows_global = False
            generators = self._inside.follow_global()
            if self._loaded is not None:
                self._loaded = {**self._loaded, "generators": generators}

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
                self._inside.read_beside_gpus(self._read_one)
                self._epochs = capture(self._inside.loader)
        elif self._has_room:
            self._inside.read(self._read_two)
        if self._cache is not None:
            self._cache.plan(
                self._held_batches.ids,
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
            batch = self._held_batches.take()
            self._batches_given += 1
            self._is_new = False
            self._loaded = self._state_before = None
            self._anchors.leave(self._batches_given)
            return batch
        last, self._last = self._last, None
        if last is _END:
            self.in_flight.has_ended = True
            self._anchors.forget()
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
        ids = self._held_batches.oldest_ids
        if not self.in_flight.reads_ahead:
            return TakenBatch(None, ids=ids)
        try:
            return TakenBatch(self._position(), ids=ids)
        except Exception as error:  # raised by the user's reader
            if came_from_handler(error):
                raise
            return TakenBatch(error, ids=ids)  # `state_dict` raises it if it is called

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
            self._state_before = self._inside.state_or_error()
        elif self._inside.is_touched:  # no batch was handed out since the load: repeat it
            self._forget()
            self._inside.load(loaded["reader"], loaded["generators"])
        self._inside.is_touched, self._told_epoch = True, None
        forward = 0 if loaded is None else loaded["forward"]
        batches = self._inside.iterate(
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
            anchor = self._anchors.newest(self._batches_given - 1)
            assert anchor is not None  # `Anchors.leave` keeps it
            state, loader = anchor.state, self._inside.loader
            now, forward = capture(loader), self._batches_given - anchor.position
            # The script may have told the samplers the next epoch.
            set_epochs(loader, self._epochs)
            self._inside.load(state, anchor.generators)
            self._inside.iterate(forward, reads=forward, generators=anchor.generators)
            set_epochs(loader, now)
            if self._told_epoch is not None:
                tell_epoch(self.reader, self._told_epoch)
        epochs = self._told_epoch
        self._forget()
        self._told_epoch = epochs

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
                self._anchors.take(self._read, at_once=self._is_torn)
                self._is_torn = False
            batch = next(self._batches, _END)
            if batch is _END:
                self._last = _END
                return
            self._held_batches.add(batch)
        except Exception as error:
            self._is_torn = True
            if came_from_handler(error):
                raise
            self._last = error
            return
        except BaseException:
            self._is_torn = True
            raise
        self._read += 1


class _Epoch:
    """An iterator over one epoch of a Lookahead."""

    def __init__(self, next_batch: Callable[[_Epoch], Any]) -> None:
        self._next_batch = next_batch
        self.is_begun = self._is_over = False

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        try:
            return self._next_batch(self)
        except StopIteration:
            self._is_over = True
            raise


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
