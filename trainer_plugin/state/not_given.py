"""Warns of state that the Checkpointer was not given: nothing fails, but a restart goes wrong.

Such state is not refused, because a script may store it itself; the log names it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.state.lookahead import Lookahead
from recpoint.trainer_plugin.state.model import ModelState
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.reader import (
    ResumableLoader,
    Stateful,
)

__all__ = ["StateNotGiven", "within"]

_log = logging.getLogger("recpoint")


class _InNoOptimizer(NamedTuple):
    """A parameter that no given optimizer trains.

    Attributes:
        name: its name.
        parameter: the parameter.
        version: how often it had been changed in place before training went on.
    """

    name: str
    parameter: Tensor
    version: int


class StateNotGiven:
    """Looks for schedulers, optimizers and a reader that the Checkpointer was not given.

    Args:
        model: state of the model outside tables.
        optimizers: state of the given optimizers.
        schedulers: the given schedulers; one that does not say which optimizer it belongs to may
            belong to any.
        reader: the given reader.
        extras: the given extras, by name; they may be or hold schedulers and optimizers, and any of
            them may hold the position in the batches.
    """

    def __init__(
        self,
        model: ModelState,
        optimizers: OptimizerState,
        schedulers: Sequence[object],
        *,
        reader: object,
        extras: Mapping[str, object],
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._schedulers = tuple(schedulers)
        self._reader = reader
        self._extras = extras
        self._in_no_optimizer: list[_InNoOptimizer] = []
        self._batches_before = 0
        self._has_told_unused = False

    def warn_of_schedulers(self) -> None:
        """Warn of each optimizer with a learning-rate scheduler that was not given.

        Such a scheduler begins anew after a restart, with its first learning rates. Called before
        anything is restored into the optimizers.
        """
        try:
            group_ids = self._groups_with_scheduler()
        except Exception as error:
            if came_from_handler(error):
                raise
            return  # reading an attribute of a user's object may raise any error
        if group_ids is None:
            return
        for number, optimizer in enumerate(self._optimizers.optimizers):
            groups = optimizer.param_groups
            # torch's schedulers leave `initial_lr` in each group.
            if any("initial_lr" in group and id(group) not in group_ids for group in groups):
                _log.warning(
                    "optimizers[%d], a %s, has a learning-rate scheduler that is not in its "
                    "checkpoints, so after a restart the scheduler would begin anew. Next: pass it "
                    "as Checkpointer(schedulers=[...]), and step it before checkpoints.step(). "
                    "Checkpoints without the scheduler cannot be restored with it; in such a run, "
                    "set its last_epoch instead",
                    number,
                    type(optimizer).__name__,
                )

    def _groups_with_scheduler(self) -> set[int] | None:
        """Return ids of the groups of optimizers with a given scheduler; None: unknown."""
        if not all(hasattr(scheduler, "optimizer") for scheduler in self._schedulers):
            return None
        # Identified by their groups, which a wrapper shares with the optimizers inside it. A
        # CombinedOptimizer of TorchRec makes a new list of them at each access.
        return {
            id(group)
            for holder in (*self._schedulers, *within(self._extras.values()))
            if hasattr(holder, "optimizer")
            for group in getattr(holder.optimizer, "param_groups", ())
        }

    def begin(self, batches_done: int) -> None:
        """Warn after a restore if neither reader nor extras can hold the position in the batches.

        Parameters that no given optimizer trains are watched from now on.

        Args:
            batches_done: batches that the checkpoint was trained on.
        """
        if self._reader is None and not self._extras and batches_done:
            _log.warning(
                "restored after %d batches, and no reader was given: training goes on with "
                "whatever batches the script reads now. Next: in a new run, pass "
                "Checkpointer(reader=...), where recpoint.ResumableLoader(loader) serves for any "
                "DataLoader",
                batches_done,
            )
        self._batches_before = batches_done
        self._in_no_optimizer = self._untrained()

    def look(self, batches_done: int) -> None:
        """Warn at a cut of a reader that gave no batch, and of optimizers that were not given."""
        trained = batches_done - self._batches_before
        if not self._has_told_unused:
            self._has_told_unused = self._warns_of_unused(trained)
        if trained and self._in_no_optimizer:
            self._warn_of_optimizers()
            self._in_no_optimizer = []

    def _warns_of_unused(self, batches: int) -> bool:
        """Warn if the reader is a `ResumableLoader` that was never asked for a batch.

        Args:
            batches: number of batches trained in this process.

        Returns:
            Whether it warned.
        """
        reader = self._reader.reader if isinstance(self._reader, Lookahead) else self._reader
        if not isinstance(reader, ResumableLoader) or isinstance(reader.loader, Stateful):
            return False  # the loader inside knows its position, even if it is iterated directly
        unused = batches > 0 and not reader.used
        if unused:
            _log.warning(
                "%d batches were trained, and the reader gave none of them: after a restart they "
                "would be trained again. Next: take the batches from the %s that is the reader, "
                "not from the loader inside it",
                batches,
                type(self._reader).__name__,
            )
        return unused

    def _untrained(self) -> list[_InNoOptimizer]:
        """Return the parameters that no given optimizer trains."""
        try:
            parameter_ids = {
                id(parameter)
                for holder in (*self._optimizers.optimizers, *within(self._extras.values()))
                for group in getattr(holder, "param_groups", ())
                for parameter in group["params"]
            }
            return [
                _InNoOptimizer(name, parameter, parameter._version)
                for name, parameter in self._model.parameters().items()
                if id(parameter) not in parameter_ids and not parameter.is_inference()
            ]
        except Exception as error:
            if came_from_handler(error):
                raise
            return []  # as in warn_of_schedulers

    def _warn_of_optimizers(self) -> None:
        """Warn of parameters that an unknown optimizer has trained, after batches were trained.

        The unknown optimizer's state would begin anew after a restart. An averaged copy of a
        parameter has no gradient, so there is no warning of it.
        """
        names = [
            lost.name
            for lost in self._in_no_optimizer
            if lost.parameter.requires_grad
            and lost.parameter.grad is not None
            and lost.parameter._version > lost.version
        ]
        if names:
            _log.warning(
                "%d parameters, %.300s, are trained, and in no optimizer that the Checkpointer was "
                "given: checkpoints hold their values, but not the state of their optimizer, which "
                "would begin anew after a restart. Next: in a new run, pass every optimizer: "
                "Checkpointer(model, [every optimizer], ...)",
                len(names),
                ", ".join(map(repr, names)),
            )


def within(things: Iterable[object]) -> Iterator[object]:
    """Yield the things, their attributes, and the members of lists and dicts among these."""
    for holder in things:
        yield holder
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, list | tuple):
                yield from value
            else:
                yield value
