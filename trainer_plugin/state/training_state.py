"""Collects the state tree: all that training needs besides tables to go on bit for bit."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.tables import TableSource
from recpoint.errors import SettingsError
from recpoint.format.state_values import MAX_TREE_DEPTH
from recpoint.interrupts import came_from_handler, let_into
from recpoint.trainer_plugin.fused_optimizers import Trainers, adopt, lacks
from recpoint.trainer_plugin.ranks.sharding import without_pieces
from recpoint.trainer_plugin.setting_checks import several
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.model import ModelState, own_part
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.reader import (
    Divisible,
    Passes,
    ResumableLoader,
    Stateful,
    refuse_prepared,
    tell_epoch,
)

__all__ = ["OF_ALL_RANKS", "OF_TRAINERS", "TrainingState", "within"]


# State of training that the Checkpointer was not given: nothing fails, and a restart goes wrong.
#
# None of it is refused, since a script may keep it itself; it is said in the log.


_log = logging.getLogger("recpoint")


def warn_of_schedulers(
    optimizers: Sequence[Optimizer], schedulers: Sequence[object], extras: Iterable[object]
) -> None:
    """Warn of each optimizer whose learning rate a scheduler sets that nothing given here holds.

    Such a scheduler begins anew after a restart, and sets the learning rates of its beginning.

    Args:
        optimizers: before anything is restored into them.
        schedulers: as given; one that does not say which optimizer it is for may be for any.
        extras: as given; they are, or hold, schedulers too.
    """
    try:
        held = _held(schedulers, extras)
    except Exception as error:
        if came_from_handler(error):
            raise
        return  # attributes are the user's, and asking for one may raise whatever it likes
    if held is None:
        return
    for number, optimizer in enumerate(optimizers):
        groups = optimizer.param_groups
        # torch's schedulers leave what they began with in each group.
        if id(groups) not in held and any("initial_lr" in group for group in groups):
            _log.warning(
                "optimizers[%d], a %s, has a learning-rate scheduler that is not in its "
                "checkpoints: after a restart it would begin anew. Next: "
                "Checkpointer(schedulers=[...]), and step it before checkpoints.step(); a run that "
                "has checkpoints without it is not restored with it: set its last_epoch there",
                number,
                type(optimizer).__name__,
            )


def warn_of_batches(reader: object, extras: Collection[str], batches_done: int) -> None:
    """Warn, after a restore, where nothing given here can hold the position in the batches.

    Args:
        reader: as given.
        extras: names of those given; any may hold it.
        batches_done: those that the checkpoint was trained on.
    """
    if reader is None and not extras and batches_done:
        _log.warning(
            "restored after %d batches, and no reader was given: training goes on with whatever "
            "batches the script reads now. Next: Checkpointer(reader=...), which "
            "recpoint.ResumableLoader(loader) is for any DataLoader, in a new run",
            batches_done,
        )


def warn_of_unused(reader: object, batches: int) -> bool:
    """Warn at a cut where the reader is a `ResumableLoader` that was never asked for a batch.

    Args:
        reader: as given.
        batches: trained in this process.

    Returns:
        Whether it warned.
    """
    if not isinstance(reader, ResumableLoader) or isinstance(reader.loader, Stateful):
        return False  # the loader in it has the position, whoever asks it for batches
    unused = batches > 0 and not reader.used
    if unused:
        _log.warning(
            "%d batches were trained, and the reader gave none of them: after a restart they would "
            "be trained again. Next: take the batches from the ResumableLoader that is the reader, "
            "not from the loader in it",
            batches,
        )
    return unused


class InNoOptimizer(NamedTuple):
    """A parameter that no optimizer given here trains, and how often it had been changed."""

    name: str
    parameter: Tensor
    version: int


def in_no_optimizer(
    parameters: Mapping[str, Tensor], optimizers: Iterable[object], extras: Iterable[object]
) -> list[InNoOptimizer]:
    """For `warn_of_optimizers`, before training goes on.

    Args:
        parameters: by name, without tables.
        optimizers: as given.
        extras: as given; they are, or hold, optimizers too.
    """
    try:
        held = {
            id(parameter)
            for thing in (*optimizers, *within(extras))
            for group in getattr(thing, "param_groups", ())
            for parameter in group["params"]
        }
        return [
            InNoOptimizer(name, parameter, parameter._version)
            for name, parameter in parameters.items()
            if id(parameter) not in held and not parameter.is_inference()
        ]
    except Exception as error:
        if came_from_handler(error):
            raise
        return []  # as above


def warn_of_optimizers(found: Sequence[InNoOptimizer]) -> None:
    """Warn, once batches were trained, of parameters that something unknown here has trained.

    What an optimizer keeps of them would begin anew after a restart. A copy that is averaged has no
    gradient, and is not meant.
    """
    names = [
        one.name
        for one in found
        if one.parameter.requires_grad
        and one.parameter.grad is not None
        and one.parameter._version > one.version
    ]
    if names:
        _log.warning(
            "%d parameters, %.300s, are trained, and in no optimizer that the Checkpointer was "
            "given: their values are in its checkpoints, and what their optimizer keeps of them "
            "would begin anew after a restart. Next: Checkpointer(model, [every optimizer], ...), "
            "in a new run",
            len(names),
            ", ".join(map(repr, names)),
        )


def _held(schedulers: Sequence[object], extras: Iterable[object]) -> set[int] | None:
    """Of which optimizers a scheduler is given; None: one does not say of which."""
    if not all(hasattr(scheduler, "optimizer") for scheduler in schedulers):
        return None
    # By their groups: a wrapped optimizer is another object and has the same ones.
    return {
        id(getattr(thing.optimizer, "param_groups", None))
        for thing in (*schedulers, *within(extras))
        if hasattr(thing, "optimizer")
    }


def within(things: Iterable[object]) -> Iterator[object]:
    """Them, and what they have as attributes or in lists and dicts there."""
    for thing in things:
        yield thing
        for value in getattr(thing, "__dict__", {}).values():
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, list | tuple):
                yield from value
            else:
                yield value


# The state tree: everything but the tables that training needs to go on bit for bit.


_KEYS = ("batches_done", "model", "optimizers", "schedulers", "reader", "extras", "sources", "rng")

#: What `TrainingState.lacks_ranks` is about.
OF_ALL_RANKS: Final = ("reader", "sources")
#: What `TrainingState.lacks_trainers` is about.
OF_TRAINERS: Final = ("sources", "optimizers")


class TrainingState:
    """Everything stateful that the checkpointer was given.

    `copies`: parameters of tables that every rank holds whole.

    Attributes:
        passes: over the reader; None: nobody counts them.
    """

    def __init__(
        self,
        *,
        model: ModelState,
        optimizers: OptimizerState,
        schedulers: Sequence[Stateful],
        reader: Stateful | None,
        extras: Mapping[str, Stateful],
        sources: Sequence[TableSource] = (),
        rank: int = 0,
        copies: Collection[str] = (),
    ) -> None:
        self._rank = rank
        self._copies = frozenset(copies)
        self._stored_elsewhere: frozenset[str] = frozenset()
        self._told_unused = False
        self._in_no_optimizer: list[InNoOptimizer] = []
        self._batches_before = 0
        self.model = model
        self.optimizers = optimizers
        if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
            raise SettingsError(
                "extras",
                found=f"{extras!r:.200}",
                expected="a mapping from names to what is saved under them",
                next_step='give extras={"name": thing}',
            )
        self._schedulers = tuple(several("schedulers", schedulers))
        self._reader = reader
        self._sources = {source.name: source for source in sources}
        self._extras = dict(extras)
        self.passes: Passes | None = None
        for subject, thing in self._given():
            if not isinstance(thing, Stateful):
                raise SettingsError(
                    subject,
                    found=f"a {type(thing).__name__} without state_dict and load_state_dict",
                    expected="something whose state can be saved",
                    next_step=f"give {subject} the two methods, or leave it out"
                    if thing is not self._reader
                    else "reader=recpoint.ResumableLoader(loader), and take the batches from it; "
                    "or give it the two methods",
                )
        refuse_prepared("reader", reader)

    def warn_of_schedulers(self) -> None:
        """Call before a restore; see the function `warn_of_schedulers`."""
        extras = self._extras.values()
        warn_of_schedulers(self.optimizers.optimizers, self._schedulers, extras)

    def warn_of_batches(self, batches_done: int) -> None:
        """Call after a restore; see the function `warn_of_batches`."""
        warn_of_batches(self._reader, tuple(self._extras), batches_done)
        self._batches_before = batches_done
        self._in_no_optimizer = in_no_optimizer(
            self.model.parameters(), self.optimizers.optimizers, self._extras.values()
        )

    def leave_to_others(self, names: frozenset[str]) -> None:
        """Dense tensors of which other ranks store the pieces that are here."""
        self._stored_elsewhere = names

    def refuse_inference(self) -> None:
        """Refuse tensors that cannot be restored in place, and of which no change is counted.

        Raises:
            SettingsError: one was made under `torch.inference_mode()`; it is named.
        """
        named = {f"parameter {name!r}": p for name, p in self.model.parameters().items()}
        named |= {f"buffer {name!r}": buffer for name, buffer in self.model.buffers().items()}
        named |= self.optimizers.written_in_place()
        for subject, tensor in named.items():
            if tensor.is_inference():
                raise SettingsError(
                    subject,
                    found="a tensor made under torch.inference_mode(), which cannot be restored in "
                    "place, and of which torch counts no changes",
                    expected="one made outside torch.inference_mode()",
                    next_step="build the model and its optimizers outside torch.inference_mode(), "
                    "or put clones there that are made outside it",
                )

    def _given(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = []
        if self._reader is not None:
            found.append(("reader", self._reader))
        found += [(f"schedulers[{i}]", thing) for i, thing in enumerate(self._schedulers)]
        found += [(f"extras[{name!r}]", thing) for name, thing in self._extras.items()]
        return found

    def capture(self, batches_done: int) -> dict[str, Any]:
        """The tree right now; its tensors are the live ones: copy them before training goes on."""
        trained = batches_done - self._batches_before
        if not self._told_unused:
            self._told_unused = warn_of_unused(self._reader, trained)
        if trained and self._in_no_optimizer:
            warn_of_optimizers(self._in_no_optimizer)
            self._in_no_optimizer = []
        tree = {
            "batches_done": batches_done,
            "reader": None if self._reader is None else _state_of("reader", self._reader),
            **self.capture_fixed(),
        }
        # What is the same everywhere is stored once.
        if self._rank == 0:
            return tree
        return own_part(tree, alike=self._copies | self.model.parameters().keys())

    def capture_fixed(self) -> dict[str, Any]:
        """The part that may be looked at outside a snapshot.

        A reader's `state_dict` is not in it: asking for it can start worker processes and draw
        random numbers.
        """
        tree = {
            "model": self.model.capture(),
            "optimizers": self.optimizers.capture(),
            "schedulers": [
                _plain_state_of(f"schedulers[{i}]", scheduler)
                for i, scheduler in enumerate(self._schedulers)
            ],
            "extras": {
                name: _plain_state_of(f"extras[{name!r}]", extra)
                for name, extra in self._extras.items()
            },
            "sources": {name: source.state_dict() for name, source in self._sources.items()},
            "rng": rng.capture(),
        }
        if self.passes is not None:
            tree["passes"] = self.passes._asdict()
        return without_pieces(tree, self._stored_elsewhere) if self._stored_elsewhere else tree

    def forms(self) -> dict[str, str]:
        """What each rank has to have, though of its own: what -> which."""
        return {
            **{f"the buffer {name!r}": "one" for name in self.model.buffers()},
            **{f"the extra state of module {name!r}": "one" for name in self.model.extra_states()},
            "optimizers": self.optimizers.classes(),
            "schedulers": str(len(self._schedulers)),
        }

    def lacks_ranks(self, saved: Mapping[str, Any]) -> bool:
        """Whether `OF_ALL_RANKS` is needed of ranks whose trees are not in it.

        A reader that goes on in another number of ranks divides what all of them had left.
        """
        if any(key not in saved for key in _KEYS):
            return False
        return (self._reader is not None and saved["reader"] is None) or any(
            source.lacks_states(saved["sources"].get(name, ()))
            for name, source in self._sources.items()
        )

    def lacks_trainers(self, saved: Mapping[str, Any]) -> bool:
        """Whether `OF_TRAINERS` is needed of ranks whose trees are not in it.

        A table may have been held, and trained, by others.
        """
        if any(key not in saved for key in _KEYS):
            return False
        return lacks(dict(saved), self._trainers(()))

    def lacks_pieces(self, saved: Mapping[str, Any]) -> bool:
        """Whether pieces of dense tensors are needed of ranks whose trees are not in it."""
        return self.model.lacks(saved["model"]) or self.optimizers.lacks(saved["optimizers"])

    def adopt(
        self, saved: dict[str, Any] | None, *, elsewhere: Collection[str]
    ) -> tuple[dict[str, Any] | None, list[str]]:
        """`saved` as if its tables had been trained by what trains them here; why they were not.

        Args:
            saved: as `model.tree_for` returned it for this rank.
            elsewhere: names of tables that this rank does not hold, and others do.
        """
        if saved is None or any(key not in saved for key in _KEYS):
            return saved, []
        return adopt(saved, self._trainers(elsewhere))

    def _trainers(self, elsewhere: Collection[str]) -> Trainers:
        return Trainers(
            optimizers=self.optimizers.capture(),
            fused={name: source.state_dict() for name, source in self._sources.items()},
            tables=self.optimizers.table_names(),
            elsewhere=elsewhere,
        )

    def differences(self, saved: Mapping[str, Any] | None) -> list[str]:
        """What does not fit this process, one sentence each; [] when `restore` will work.

        Args:
            saved: as `adopt` returned it.
        """
        if saved is None or any(key not in saved for key in _KEYS):
            return ["the checkpoint holds no training state"]
        found = self.model.differences(saved["model"])
        found += self.optimizers.differences(saved["optimizers"])
        if len(saved["schedulers"]) != len(self._schedulers):
            found.append(
                f"{len(self._schedulers)} schedulers here, "
                f"{len(saved['schedulers'])} in the checkpoint"
            )
        for number, (scheduler, state) in enumerate(
            zip(self._schedulers, saved["schedulers"], strict=False)
        ):
            here, there = _rates(scheduler.state_dict()), _rates(state)
            if here != there:
                found.append(
                    f"schedulers[{number}] sets {here} learning rates here, {there} in the "
                    "checkpoint"
                )
        stored = [state for state in saved["readers"] if state is not None]
        if bool(stored) != (self._reader is not None):
            where = "here" if self._reader is not None else "in the checkpoint"
            found.append(f"there is a reader only {where}")
        elif stored and saved["reader"] is None and not isinstance(self._reader, Divisible):
            found.append(
                f"the checkpoint has the readers of {len(stored)} ranks, and there are more or "
                "fewer here: give the reader load_state_dicts(states, rank, ranks), or train on "
                f"{len(stored)} ranks"
            )
        for name in sorted(saved["extras"].keys() ^ self._extras.keys()):
            where = "here" if name in self._extras else "in the checkpoint"
            found.append(f"extra {name!r} is only {where}")
        for name in sorted(saved["sources"].keys() & self._sources.keys()):
            found += self._sources[name].differences(saved["sources"][name])
        for name in sorted(saved["sources"].keys() ^ self._sources.keys()):
            where = "here" if name in self._sources else "in the checkpoint"
            found.append(f"the state of the tables of {name} is only {where}")
        return found

    def restore(
        self,
        saved: Mapping[str, Any],
        row_states: Mapping[str, Mapping[str, Tensor]],
        *,
        ranks: int = 1,
        attempt: str = "",
    ) -> int:
        """Put everything back; the tables have been written. Returns the batches done.

        Args:
            saved: as `adopt` returned it.
            row_states: of the tables, see `OptimizerState.restore`.
            ranks: how many there are.
            attempt: of the checkpoint; what a generator is seeded from that was not there.
        """
        self.model.restore(saved["model"])
        # Before the optimizers: a scheduler may set learning rates while it loads.
        for scheduler, state in zip(self._schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(_like(scheduler.state_dict(), state))
        self.optimizers.restore(saved["optimizers"], row_states)
        for name, source in self._sources.items():
            source.load_state_dicts(saved["sources"][name])
        for name, extra in self._extras.items():
            extra.load_state_dict(_like(extra.state_dict(), saved["extras"][name]))
        passes = saved.get("passes")
        self.passes = None if passes is None else Passes(passes["done"], passes["batches"])
        if self._reader is not None:
            if self.passes is not None:
                tell_epoch(self._reader, self.passes.done)  # the order of samples depends on it
            if saved["reader"] is not None:
                self._reader.load_state_dict(saved["reader"])
            else:
                assert isinstance(self._reader, Divisible)  # differences() has looked
                self._reader.load_state_dicts(saved["readers"], self._rank, ranks)
            # A lazy reader (torchdata's loader) starts its iterator when it is first needed, and
            # draws random numbers then: let it do so before the generators are put back.
            self._reader.state_dict()
        if saved["rng"] is not None:
            rng.restore(saved["rng"])
        else:
            _log.warning(
                "the checkpoint has no rank %d: its random generators are seeded anew, so that "
                "results differ from those of an uninterrupted run",
                self._rank,
            )
            rng.seed(f"{attempt}|{self._rank}")
        return int(saved["batches_done"])


def _rates(state: object) -> int:
    """How many groups a scheduler of torch is for; 0: it does not say."""
    rates = state.get("base_lrs") if isinstance(state, Mapping) else None
    return len(rates) if isinstance(rates, list | tuple) else 0


def _state_of(subject: str, thing: Stateful) -> Any:
    """Its `state_dict()`, whose errors are a user's: they are told whose, at each checkpoint."""
    try:
        return let_into(thing.state_dict)
    except Exception as error:
        note = f"from state_dict() of {subject}"
        if note not in getattr(error, "__notes__", ()):  # one error may be raised many times
            error.add_note(note)
        raise


def _plain_state_of(subject: str, thing: Stateful) -> Any:
    state = _state_of(subject, thing)
    try:
        return _plain(state)
    except RecursionError:
        raise SettingsError(
            subject,
            found="a state that contains itself, or has hundreds of levels",
            expected=f"at most {MAX_TREE_DEPTH} levels as JSON",
            next_step="leave out of its state_dict() what refers back to it",
        ) from None


def _plain(value: Any) -> Any:
    """Counters as dicts, in place of refusing them: MultiStepLR keeps its milestones in one."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_plain(item) for item in value)
    return value


def _like(template: Any, value: Any) -> Any:
    """`value` with the dict classes that the same places of `template` have."""
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
