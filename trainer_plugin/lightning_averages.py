"""Refuses Lightning's averages of weights that no checkpoint holds, or that mix rows of keys."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from recpoint.embeddings.tables.keyed import slots_of
from recpoint.errors import SettingsError

__all__ = ["refuse_averages"]


def refuse_averages(callbacks: Iterable[object], module: nn.Module) -> None:
    """Refuse callbacks that average weights in a way that a restart would get wrong.

    Args:
        callbacks: those of the trainer.
        module: the module that it trains.

    Raises:
        SettingsError: `WeightAveraging` keeps its average outside of its state. Any average of a
            keyed table would mix the rows of all keys that have had a slot, and is written into
            the module at the end, or for a validation.
    """
    keyed_names = [name for name, part in module.named_modules() if slots_of(part) is not None]
    for callback in callbacks:
        # By name: lightning and pytorch_lightning have their own classes, newer versions more.
        names = {kind.__name__ for kind in type(callback).__mro__}
        if keyed_names and names & {"WeightAveraging", "StochasticWeightAveraging"}:
            raise SettingsError(
                f"Trainer(callbacks=[{type(callback).__name__}(...)])",
                found=f"the keyed table {keyed_names[0]!r}, whose slots have other keys over time",
                expected="averages of rows that belong to the same keys",
                next_step="remove the callback, or average the dense layers alone in a callback "
                "of your own",
            )
        if "WeightAveraging" in names:
            raise SettingsError(
                f"Trainer(callbacks=[{type(callback).__name__}(...)])",
                found="an average that is not in the callback's state_dict(), so that no "
                "checkpoint would have it",
                expected="callbacks whose state_dict() has all of their state",
                next_step="pass extras={name: model} with an AveragedModel of torch that you "
                "update, or remove the callback",
            )
