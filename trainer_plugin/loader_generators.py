"""The random generators that a dataloader, its samplers and its dataset draw from."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "is_told_later", "restore", "set_epochs"]

_log = logging.getLogger("recpoint")

#: Where the parts of a loader are: samplers may wrap samplers, and datasets other datasets.
_PARTS = ("sampler", "batch_sampler", "dataset")
_MAX_PARTS = 32


def capture(loader: object) -> dict[str, Any]:
    """The states of its own generators, and the epochs that its samplers are in.

    The global generators are `rng_state`'s. What workers draw from are copies, which nobody sees.
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
