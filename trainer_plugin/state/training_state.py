"""Collects the state tree: all state outside tables that training needs to go on bit for bit."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from recpoint.embeddings.tables.tables import TableSource
from recpoint.errors import SettingsError
from recpoint.format.state_values import MAX_TREE_DEPTH
from recpoint.interrupts import let_into
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.fused_optimizers import TableOptimizers, adopt, lacks
from recpoint.trainer_plugin.integrations import RateSchedule
from recpoint.trainer_plugin.mismatches import Mismatch, reader_of_ranks
from recpoint.trainer_plugin.ranks.sharding import without_pieces
from recpoint.trainer_plugin.setting_checks import several
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.import_note import imported_path
from recpoint.trainer_plugin.state.lookahead import Lookahead, is_divisible, load_divided
from recpoint.trainer_plugin.state.lookahead_state import goes_forward, load_without, was_ahead
from recpoint.trainer_plugin.state.model import ModelState, own_part
from recpoint.trainer_plugin.state.not_given import StateNotGiven
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.reader import (
    Passes,
    Stateful,
    refuse_prepared,
    tell_epoch,
)
from recpoint.trainer_plugin.state.writable import refuse_unwritable

__all__ = ["OF_ALL_RANKS", "OF_TRAINERS", "TrainingState"]

_log = logging.getLogger("recpoint")

_KEYS = ("batches_done", "model", "optimizers", "schedulers", "reader", "extras", "sources", "rng")

#: Keys of a tree that are needed of all ranks if `TrainingState.lacks_ranks`.
OF_ALL_RANKS: Final = ("reader", "sources")
#: Keys of a tree that are needed of all ranks if `TrainingState.lacks_trainers`.
OF_TRAINERS: Final = ("sources", "optimizers")


class TrainingState:
    """Captures and restores all state outside tables that the Checkpointer was given.

    Args:
        model: state of the model outside tables.
        optimizers: state of the optimizers.
        schedulers: the given schedulers.
        schedules: what sets learning rates around the optimizers; stored behind the schedulers.
        reader: the given reader.
        extras: the given extras, by name.
        sources: sources of tables that libraries keep in their own form.
        rank: rank of this process.
        copies: names of the weights of tables that every rank holds whole.

    Attributes:
        not_given: warns of state that the Checkpointer was not given.
        passes: passes over the reader; None: nobody counts them.
        loss: what is known of the loss that rounding costs; None: it is not measured.

    Raises:
        SettingsError: an object has no `state_dict` and `load_state_dict`, or is a loader that
            Accelerate prepared.
    """

    def __init__(
        self,
        *,
        model: ModelState,
        optimizers: OptimizerState,
        schedulers: Sequence[Stateful],
        schedules: Sequence[RateSchedule] = (),
        reader: Stateful | None,
        extras: Mapping[str, Stateful],
        sources: Sequence[TableSource] = (),
        rank: int = 0,
        copies: Collection[str] = (),
    ) -> None:
        self._rank = rank
        self._copies = frozenset(copies)
        self._stored_elsewhere: frozenset[str] = frozenset()
        self.model = model
        self.optimizers = optimizers
        if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
            raise SettingsError(
                "extras",
                found=f"{extras!r:.200}",
                expected="a mapping from names to the objects that are saved under them",
                next_step='pass extras={"name": thing}',
            )
        self._schedulers = tuple(several("schedulers", schedulers))
        self._schedules = tuple(schedules)
        self._reader = reader
        self._sources = {source.name: source for source in sources}
        self._extras = dict(extras)
        self.not_given = StateNotGiven(
            model, optimizers, self._schedulers, reader=reader, extras=self._extras
        )
        self.passes: Passes | None = None
        self.loss: Stateful | None = None
        for subject, state_object in self._given():
            if not isinstance(state_object, Stateful):
                raise SettingsError(
                    subject,
                    found=f"a {type(state_object).__name__} without state_dict and load_state_dict",
                    expected="an object with both methods, so that its state can be saved",
                    next_step=f"give {subject} the two methods, or leave it out"
                    if state_object is not self._reader
                    else "pass reader=recpoint.ResumableLoader(loader), and loop over "
                    "Checkpointer.batches(epochs=...); or give the reader the two methods",
                )
        refuse_prepared("reader", reader)

    def leave_to_others(self, names: frozenset[str]) -> None:
        """Leave out these dense tensors, because other ranks store the pieces held here."""
        self._stored_elsewhere = names

    def refuse_unwritable(self) -> None:
        """Refuse tensors that cannot be restored in place; see the function `refuse_unwritable`."""
        named = {f"parameter {name!r}": p for name, p in self.model.parameters().items()}
        named |= {f"buffer {name!r}": buffer for name, buffer in self.model.buffers().items()}
        refuse_unwritable(named | self.optimizers.written_in_place(), self._extras)

    def _given(self) -> list[tuple[str, object]]:
        state_objects: list[tuple[str, object]] = []
        if self._reader is not None:
            state_objects.append(("reader", self._reader))
        state_objects += [
            (f"schedulers[{i}]", scheduler) for i, scheduler in enumerate(self._schedulers)
        ]
        state_objects += [(f"extras[{name!r}]", extra) for name, extra in self._extras.items()]
        return state_objects

    def capture(self, batches_done: int) -> dict[str, Any]:
        """Return the tree as it is now, with live tensors; copy them before training goes on."""
        self.not_given.look(batches_done)
        tree = {
            "batches_done": batches_done,
            "reader": None if self._reader is None else _state_of("reader", self._reader),
            **self.capture_fixed(),
        }
        # Only rank 0 stores the state that is equal on all ranks.
        if self._rank == 0:
            return tree
        return own_part(tree, alike=self._copies | self.model.parameters().keys())

    def capture_fixed(self) -> dict[str, Any]:
        """Return the part of the tree that may be captured outside a snapshot.

        It has no reader's state: calling a reader's `state_dict` can start worker processes and
        draw random numbers.
        """
        tree = {
            "model": self.model.capture(),
            "optimizers": self.optimizers.capture(),
            "schedulers": [
                _plain_state_of(f"schedulers[{i}]", scheduler)
                for i, scheduler in enumerate(self._schedulers)
            ]
            + [schedule.state_dict() for schedule in self._schedules],
            "extras": {
                name: _plain_state_of(f"extras[{name!r}]", extra)
                for name, extra in self._extras.items()
            },
            "sources": {name: source.state_dict() for name, source in self._sources.items()},
            "rng": rng.capture(),
        }
        if self.passes is not None:
            tree["passes"] = self.passes._asdict()
        if self.loss is not None:
            tree["loss"] = self.loss.state_dict()
        return without_pieces(tree, self._stored_elsewhere) if self._stored_elsewhere else tree

    def forms(self) -> dict[str, str]:
        """Return the form of state that each rank must have, with its own values: what -> form."""
        return {
            **{f"the buffer {name!r}": "one" for name in self.model.buffers()},
            **{f"the extra state of module {name!r}": "one" for name in self.model.extra_states()},
            "optimizers": self.optimizers.classes(),
            "schedulers": str(len(self._schedulers) + len(self._schedules)),
        }

    def lacks_ranks(self, saved: Mapping[str, Any]) -> bool:
        """Whether `saved` needs `OF_ALL_RANKS` from trees that are not merged into it yet.

        If the number of ranks has changed, a reader divides what the readers of all ranks had left.
        """
        if any(key not in saved for key in _KEYS):
            return False
        return (self._reader is not None and saved["reader"] is None) or any(
            source.lacks_states(saved["sources"].get(name, ()))
            for name, source in self._sources.items()
        )

    def lacks_trainers(self, saved: Mapping[str, Any]) -> bool:
        """Whether `saved` needs `OF_TRAINERS` from trees that are not merged into it yet.

        Other ranks may have held and trained a table that this rank holds now.
        """
        if any(key not in saved for key in _KEYS):
            return False
        return lacks(dict(saved), self._trainers(()))

    def lacks_pieces(self, saved: Mapping[str, Any]) -> bool:
        """Whether `saved` needs pieces of dense tensors from trees not merged into it yet."""
        return self.model.lacks(saved["model"]) or self.optimizers.lacks(saved["optimizers"])

    def adopt(
        self, saved: dict[str, Any] | None, *, elsewhere: Collection[str]
    ) -> tuple[dict[str, Any] | None, list[Mismatch]]:
        """Rewrite a tree as if the optimizers here had trained its tables.

        Args:
            saved: as `model.tree_for` returned it for this rank.
            elsewhere: names of tables that only other ranks hold.

        Returns:
            The tree, and the reasons why it cannot be rewritten; see `fused_optimizers.adopt`.
        """
        if saved is None or any(key not in saved for key in _KEYS):
            return saved, []
        if imported_path(saved) is not None:
            return {**saved, "model": self.model.completed(saved["model"])}, []
        return adopt(saved, self._trainers(elsewhere))

    def _trainers(self, elsewhere: Collection[str]) -> TableOptimizers:
        return TableOptimizers(
            optimizers=self.optimizers.capture(),
            fused={name: source.state_dict() for name, source in self._sources.items()},
            tables=self.optimizers.table_names(),
            elsewhere=elsewhere,
        )

    def differences(self, saved: Mapping[str, Any] | None) -> list[Mismatch]:
        """Return what does not fit this process; [] if `restore` will work.

        Args:
            saved: as `adopt` returned it.
        """
        if saved is None or any(key not in saved for key in _KEYS):
            return [Mismatch("the checkpoint holds no training state", mismatches.NO_STATE)]
        differences = self.model.differences(saved["model"])
        if imported_path(saved) is not None:
            return differences
        differences += self.optimizers.differences(saved["optimizers"])
        differences += self._schedule_differences(saved["schedulers"])
        for number, (scheduler, state) in enumerate(
            zip(self._schedulers, saved["schedulers"], strict=False)
        ):
            rates_here, rates_stored = _rates(scheduler.state_dict()), _rates(state)
            if rates_here != rates_stored:
                text = (
                    f"schedulers[{number}] sets {rates_here} learning rates here, {rates_stored} "
                    "in the "
                    "checkpoint"
                )
                differences.append(Mismatch(text, mismatches.SCHEDULER_RATES))
        stored = [state for state in saved["readers"] if state is not None]
        if self._reader is not None and not stored:
            differences.append(Mismatch("there is a reader only here", mismatches.READER_ONLY_HERE))
        elif self._reader is None and stored:
            text = "there is a reader only in the checkpoint"
            differences.append(Mismatch(text, mismatches.READER_ONLY_THERE))
        elif stored and saved["reader"] is None and not _divides(self._reader, stored):
            text = (
                f"the checkpoint has the readers of {len(stored)} ranks, there are more or fewer "
                "ranks here, and the reader cannot divide what is left"
            )
            differences.append(Mismatch(text, reader_of_ranks(len(stored))))
        elif goes_forward(saved["reader"]) and not isinstance(self._reader, Iterable):
            text = (
                "the checkpoint's reader was in a Lookahead, so batches must be read forward, and "
                f"the reader here, a {type(self._reader).__name__}, is not iterable"
            )
            differences.append(Mismatch(text, mismatches.READ_FORWARD))
        for name in sorted(saved["extras"].keys() ^ self._extras.keys()):
            differences.append(
                Mismatch(f"extra {name!r} is only here", mismatches.EXTRA_ONLY_HERE)
                if name in self._extras
                else Mismatch(
                    f"extra {name!r} is only in the checkpoint", mismatches.EXTRA_ONLY_THERE
                )
            )
        for name in sorted(saved["sources"].keys() & self._sources.keys()):
            differences += [
                Mismatch(text, self._sources[name].settings_step)
                for text in self._sources[name].differences(saved["sources"][name])
            ]
        for name in sorted(saved["sources"].keys() ^ self._sources.keys()):
            text = f"the state of the tables of {name} is only"
            differences.append(
                Mismatch(f"{text} here", mismatches.SOURCE_ONLY_HERE)
                if name in self._sources
                else Mismatch(f"{text} in the checkpoint", mismatches.SOURCE_ONLY_THERE)
            )
        return differences

    def _schedule_differences(self, saved: Sequence[Any]) -> list[Mismatch]:
        """Return why the stored schedulers are not those here; warm-ups are stored behind them."""
        count = len(self._schedulers)
        if len(saved) != count + len(self._schedules):
            of_optimizers = f" and {len(self._schedules)} warm-ups" if self._schedules else ""
            text = f"{count} schedulers{of_optimizers} here, {len(saved)} in the checkpoint"
            return [Mismatch(text, mismatches.SCHEDULER_COUNT)]
        texts = [
            f"a WarmupOptimizer in the checkpoint stands where schedulers[{number}] is here"
            for number, (scheduler, state) in enumerate(zip(self._schedulers, saved, strict=False))
            if _is_warm_up(state) and not _is_warm_up(scheduler.state_dict())
        ]
        texts += [
            text
            for schedule, state in zip(self._schedules, saved[count:], strict=True)
            for text in schedule.differences(state)
        ]
        return [Mismatch(text, mismatches.WARM_UP) for text in texts]

    def restore(
        self,
        saved: Mapping[str, Any],
        row_states: Mapping[str, Mapping[str, Tensor]],
        *,
        ranks: int = 1,
        attempt: str = "",
    ) -> int:
        """Restore all state outside tables; the tables have been restored already.

        Of an imported checkpoint, only dense tensors are restored.

        Args:
            saved: as `adopt` returned it.
            row_states: row states of the tables; see `OptimizerState.restore`.
            ranks: number of ranks now.
            attempt: attempt of the checkpoint. If the checkpoint has no rank of this number, the
                random generators are seeded from it and the rank.

        Returns:
            Batches done.
        """
        self.model.restore(saved["model"])
        if imported_path(saved) is not None:
            return 0
        # Before the optimizers, because a scheduler may set learning rates while it loads.
        for scheduler, state in zip(self._schedulers, saved["schedulers"], strict=False):
            scheduler.load_state_dict(_like(scheduler.state_dict(), state))
        self.optimizers.restore(saved["optimizers"], row_states)
        for name, source in self._sources.items():
            source.load_state_dicts(saved["sources"][name])
        # After the optimizers, because a schedule keeps its position in their state.
        of_schedules = saved["schedulers"][len(self._schedulers) :]
        for schedule, state in zip(self._schedules, of_schedules, strict=True):
            schedule.load_state_dict(state)
        for name, extra in self._extras.items():
            extra.load_state_dict(_like(extra.state_dict(), saved["extras"][name]))
        passes = saved.get("passes")
        self.passes = None if passes is None else Passes(passes["done"], passes["batches"])
        if self.loss is not None and saved.get("loss") is not None:
            self.loss.load_state_dict(saved["loss"])
        ahead = was_ahead(saved["reader"]) and not isinstance(self._reader, Lookahead)
        if self._reader is not None:
            if self.passes is not None:
                tell_epoch(self._reader, self.passes.done)  # it decides the order of samples
            if saved["reader"] is None:  # differences() has checked that it can be divided
                load_divided(self._reader, saved["readers"], self._rank, ranks)
            elif not ahead:
                self._reader.load_state_dict(saved["reader"])
            if not ahead:
                # A lazy reader (torchdata's loader) draws random numbers when it starts its
                # iterator. This starts it now, before the generators are restored.
                self._reader.state_dict()
        if saved["rng"] is not None:
            rng.restore(saved["rng"])
        else:
            _log.warning(
                "the checkpoint has no rank %d, so the random generators of this rank are seeded "
                "anew: results differ from an uninterrupted run",
                self._rank,
            )
            rng.seed(f"{attempt}|{self._rank}")
        # Last, because a reader's own generators follow the global ones, or take their place.
        if isinstance(self._reader, Lookahead):
            self._reader.generators_restored()
        elif ahead:
            load_without(self._reader, saved["reader"])
        return int(saved["batches_done"])


def _divides(reader: object, states: Iterable[object]) -> bool:
    """Whether the reader can go on from the states of another number of ranks."""
    return is_divisible(reader) and not any(goes_forward(state) for state in states)


def _rates(state: object) -> int:
    """Return for how many groups a torch scheduler sets the learning rate; 0: unknown."""
    rates = state.get("base_lrs") if isinstance(state, Mapping) else None
    return len(rates) if isinstance(rates, list | tuple) else 0


def _is_warm_up(state: object) -> bool:
    return isinstance(state, Mapping) and state.keys() == {"warm_up"}


def _state_of(subject: str, state_object: Stateful) -> Any:
    """Return the user's `thing.state_dict()`; add to its errors a note that names `subject`."""
    try:
        return let_into(state_object.state_dict)
    except Exception as error:
        note = f"from state_dict() of {subject}"
        if note not in getattr(error, "__notes__", ()):  # a user may raise one error repeatedly
            error.add_note(note)
        raise


def _plain_state_of(subject: str, state_object: Stateful) -> Any:
    state = _state_of(subject, state_object)
    try:
        return _plain(state)
    except RecursionError:
        raise SettingsError(
            subject,
            found="a state that contains itself, or has hundreds of levels",
            expected=f"at most {MAX_TREE_DEPTH} levels as JSON",
            next_step="remove from its state_dict() what refers back to the state itself",
        ) from None


def _plain(value: Any) -> Any:
    """Turn subclasses of dict into dicts: MultiStepLR, for instance, keeps a Counter."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_plain(item) for item in value)
    return value


def _like(template: Any, value: Any) -> Any:
    """Return `value` with the dict classes that `template` has in the same places."""
    if isinstance(value, dict) and isinstance(template, dict):
        items = {
            key: _like(template[key], item) if key in template else item
            for key, item in value.items()
        }
        return type(template)(items) if type(template) in (Counter, OrderedDict) else items
    if isinstance(value, list | tuple) and isinstance(template, list | tuple):
        if type(value) is type(template) and len(value) == len(template):
            return type(value)(_like(t, v) for t, v in zip(template, value, strict=True))
    return value
