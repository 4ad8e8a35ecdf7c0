"""Finds the parts of a dataloader, and stores their generators and the epochs of its samplers."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "is_told_later", "restore", "set_epochs", "with_epoch"]

_log = logging.getLogger("recpoint")

#: Attributes with the parts of a loader; samplers may wrap samplers, and datasets other datasets.
_PARTS = ("sampler", "batch_sampler", "dataset")
_MAX_PARTS = 32


def capture(loader: object) -> dict[str, Any]:
    """Return the states of a loader's own generators, and the epochs of its samplers.

    `rng` captures the global generators. Worker processes draw from copies, whose states cannot be
    read.
    """
    return {
        "states": {name: _state(generator) for name, generator in _generators(loader)},
        "epochs": {place: part.epoch for place, part in with_epoch(loader)},
    }


def restore(loader: object, saved: Mapping[str, Any]) -> None:
    """Restore the states of the generators that `capture` found and that still exist.

    A generator that is of another kind now is skipped with a warning.
    """
    states = saved["states"]
    for name, generator in _generators(loader):
        if states.get(name) is None:
            continue
        try:
            _set_state(generator, states[name])
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            _log.warning(
                "the training dataloader's generator %s is not restored, so the batches that it "
                "draws will differ: it is a %s, and the checkpoint's generator was of another kind "
                "(%s). Next: use the kind of generator that the run was trained with",
                name,
                type(generator).__qualname__,
                error,
            )


def set_epochs(loader: object, saved: Mapping[str, Any]) -> tuple[int, int] | None:
    """Set the samplers to the epochs in which `capture` found them.

    Returns:
        For the first sampler that was set to another epoch: the epoch that the script had set, and
        the epoch that it has now. None: no sampler was changed.
    """
    changed = None
    for place, part in with_epoch(loader):
        current_epoch, epoch = part.epoch, saved["epochs"].get(place, part.epoch)
        if current_epoch != epoch:
            part.set_epoch(epoch)
            changed = changed or (current_epoch, epoch)
    return changed


def is_told_later(loader: object, saved: Mapping[str, Any]) -> bool:
    """Whether the script has set a sampler to a later epoch than the one `capture` found."""
    return any(
        part.epoch > saved["epochs"].get(place, part.epoch) for place, part in with_epoch(loader)
    )


def _parts(loader: object) -> Iterator[tuple[str, object]]:
    """Yield the loader and its parts, each once, with the path of attributes to it."""
    parts: dict[int, tuple[str, object]] = {}
    pending: list[tuple[str, object]] = [("", loader)]
    while pending and len(parts) < _MAX_PARTS:
        place, part = pending.pop(0)
        if part is None or id(part) in parts:
            continue
        parts[id(part)] = place, part
        pending += [(f"{place}{name}.", _attributes(part).get(name)) for name in _PARTS]
    yield from parts.values()


def _attributes(part: object) -> Mapping[str, Any]:
    """Return the attributes of the instance; reading others may run any code of its class."""
    attributes = getattr(part, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _generators(loader: object) -> Iterator[tuple[str, Any]]:
    """Yield each generator once, with the path of attributes to it."""
    generator_ids = set()
    for place, part in _parts(loader):
        # A copy, because a thread of the dataset may add attributes meanwhile.
        for name, value in list(_attributes(part).items()):
            if _is_generator(value) and id(value) not in generator_ids:
                generator_ids.add(id(value))
                yield f"{place}{name}", value


def _is_generator(value: object) -> bool:
    """Whether the value is a generator whose state recpoint knows how to store and restore.

    State methods of a user's class are not called: training waits here, and an error in them would
    end training or prevent all checkpoints.
    """
    if isinstance(value, random.Random):  # excludes the subclass SystemRandom, which has no state
        kind = type(value)
        return (kind.getstate, kind.setstate) == (random.Random.getstate, random.Random.setstate)
    if isinstance(value, np.random.RandomState):  # set_state accepts only states of MT19937
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
    """Turn arrays into lists of numbers, because the format cannot store arrays of uint64."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def with_epoch(loader: object) -> list[tuple[str, Any]]:
    """Return the parts of a loader that have an epoch, with the path of attributes to each."""
    return [
        (place, part)
        for place, part in _parts(loader)
        if part is not loader
        and isinstance(_attributes(part).get("epoch"), int)
        and callable(getattr(type(part), "set_epoch", None))
    ]
