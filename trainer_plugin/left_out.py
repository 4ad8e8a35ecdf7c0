"""State of training that the Checkpointer was not given: nothing fails, and a restart goes wrong.

None of it is refused, since a script may keep it itself; it is said in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.reader import Stateful
from recpoint.trainer_plugin.resumable_loader import ResumableLoader

__all__ = [
    "InNoOptimizer",
    "in_no_optimizer",
    "warn_of_batches",
    "warn_of_optimizers",
    "warn_of_schedulers",
    "warn_of_unused",
    "within",
]

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
