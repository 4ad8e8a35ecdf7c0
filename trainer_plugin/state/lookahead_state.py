"""Reads the states of a Lookahead, which hold a reader's state and how far to read from there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final, TypeGuard

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.state import rng

__all__ = [
    "ahead_state",
    "check_version",
    "drop_batches",
    "goes_forward",
    "load_without",
    "was_ahead",
    "without_lookahead",
]

_log = logging.getLogger("recpoint")

_MARK: Final = "lookahead"
_VERSION: Final = 1
_KEYS: Final = {_MARK, "reader", "forward", "generators"}
_END: Final[Any] = object()


def ahead_state(state: Any, forward: int, generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as `Lookahead.state_dict` does.

    Args:
        state: state of the reader inside.
        forward: number of batches to read from there.
        generators: states of the reader's own generators there.
    """
    return {_MARK: _VERSION, "reader": state, "forward": forward, "generators": generators}


def was_ahead(state: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a reader's state is one that `Lookahead.state_dict` returned."""
    return isinstance(state, Mapping) and _MARK in state and state.keys() >= _KEYS


def goes_forward(state: object) -> bool:
    """Whether batches must be read and dropped after the reader has loaded the state."""
    return was_ahead(state) and bool(state["forward"])


def without_lookahead(state: Any) -> Any:
    """Return the state of the reader inside, if the state is a Lookahead's."""
    return state["reader"] if was_ahead(state) else state


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
    check_version(state)
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
        drop_batches(iter(reader), state["forward"])
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


def check_version(state: Mapping[str, Any]) -> None:
    """Refuse the state of another version of a Lookahead.

    Raises:
        SettingsError: the version is not known here.
    """
    if state[_MARK] != _VERSION:
        raise SettingsError(
            "the checkpoint's reader state",
            found=f"version {state[_MARK]!r:.20} of a Lookahead's state",
            expected=f"version {_VERSION}",
            next_step="restore with the release of recpoint that wrote the checkpoint, or newer",
        )


def drop_batches(batches: Iterator[Any], count: int) -> None:
    """Read so many batches that were trained, and drop them.

    Raises:
        SettingsError: the reader has fewer batches left.
    """
    for number in range(count):
        if next(batches, _END) is _END:
            raise SettingsError(
                "the reader",
                found=f"{number} batches after the position that it has loaded",
                expected=f"at least the {count} that the checkpoint was trained on",
                next_step="use the reader that the run was trained with",
            )
