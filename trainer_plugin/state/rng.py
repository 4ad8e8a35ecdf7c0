"""Captures and restores the process's random generators: Python, numpy, torch, each CUDA device."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import torch

from recpoint.errors import SettingsError

__all__ = ["OwnGenerators", "capture", "capture_cpu", "restore", "seed", "untouched"]


T = TypeVar("T")

_log = logging.getLogger("recpoint")


def capture() -> dict[str, Any]:
    """Return the state of all global generators, without drawing from any of them.

    Raises:
        SettingsError: numpy's global generator is not numpy's default kind, MT19937.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {**capture_cpu(), "cuda": list(cuda)}


def capture_cpu() -> dict[str, Any]:
    """Return the state of the global generators as `capture` does, without those of GPUs.

    Raises:
        SettingsError: as for `capture`.
    """
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise SettingsError(
            "the global random generator of numpy",
            found=f"a {numpy['bit_generator']}",
            expected="a MT19937, numpy's own",
            next_step="do not call np.random.set_bit_generator; give a generator of your own to "
            "the code that draws, and store its state with extras={name: thing}",
        )
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss},
        "numpy": {
            "kind": str(numpy["bit_generator"]),
            "keys": np.asarray(numpy["state"]["key"]).astype(np.int64),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "cached": float(numpy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": [],
    }


def seed(name: str) -> None:
    """Seed all generators from a name: equal names give equal seeds."""
    words = hashlib.sha256(name.encode()).digest()
    random.seed(words)
    np.random.seed(np.frombuffer(words, np.uint32))
    torch.manual_seed(int.from_bytes(words[:8], "little") >> 1)


@contextmanager
def untouched() -> Iterator[None]:
    """Run a block and put all generators back afterwards, whatever the block draws.

    Clients of object stores draw from Python's generator. Without this, a seeded training would
    depend on whether and where it is checkpointed.
    """
    generators = capture()
    try:
        yield
    finally:
        restore(generators)


def restore(saved: Mapping[str, Any]) -> None:
    """Restore all generators; done last, because loading other state may draw from them."""
    python, numpy = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (
            numpy["kind"],
            numpy["keys"].astype(np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        )
    )
    torch.set_rng_state(saved["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(saved["cuda"][:devices]):
        torch.cuda.set_rng_state(state, device)
    if len(saved["cuda"]) > devices:
        _log.warning(
            "the checkpoint holds random generators of %d GPUs, but %d GPUs are here, so their "
            "random numbers will differ. Next: resume on as many GPUs for identical results",
            len(saved["cuda"]),
            devices,
        )


#: numpy's global `RandomState`; its bit generator can be exchanged, the object itself cannot.
_NUMPY: Final[Any] = np.random.mtrand._rand
#: numpy's stubs lack `get_bit_generator` and `set_bit_generator`.
_UNTYPED: Final[Any] = np.random


class OwnGenerators:
    """Generators from which a call draws in place of the global ones.

    `run` puts their states in place of those of Python's, numpy's and torch's CPU generator while
    it calls a function. Then it puts the global generators back as they were, so that other code
    draws what it would have drawn without the call. This costs some 40 µs; it costs about 50 µs
    more for each side that has drawn normal numbers with numpy's global generator since the last
    call. Generators of GPUs are not replaced.

    They begin with seeds that follow from the states of the global generators, which are not drawn
    from. Therefore equally seeded processes have equal generators, and these draw other numbers
    than the global ones.

    Raises:
        SettingsError: as for `capture`.
    """

    def __init__(self) -> None:
        # No global generator is seeded for this: torch would note the seed for GPUs, too.
        words = _digest(capture_cpu())
        bits = np.random.MT19937(np.frombuffer(words, np.uint32).tolist())
        chance = torch.Generator().manual_seed(int.from_bytes(words[:8], "little") >> 1)
        self._bits = bits
        #: States of Python's and torch's generator, and numpy's second normal number, if any.
        self._own_states: tuple[Any, torch.Tensor, float | None]
        self._own_states = random.Random(words).getstate(), chance.get_state(), None
        self._global_states: tuple[Any, torch.Tensor, Any, float | None] | None = None
        self._is_taken = True
        self._known_states: tuple[bytes, float | None] | None = None
        self._began = b""

    def run(self, call: Callable[[], T]) -> T:
        """Call a function that draws from these generators; it must not call `run`."""
        try:
            try:
                self._put_in_place()
                return call()
            finally:
                self._put_back()
        except BaseException:
            self._put_back()  # again: a signal handler may have raised in or before the line above
            raise

    def run_beside_gpus(self, call: Callable[[], T]) -> T:
        """Call a function as `run` does, and put the generators of GPUs back afterwards, too.

        For code that restores all generators, as a `ResumableLoader` does when an epoch goes on.
        """
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        try:
            return self.run(call)
        finally:
            for device, state in enumerate(gpus):
                torch.cuda.set_rng_state(state, device)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set their states.

        Args:
            saved: states as `capture_cpu` returned them.
        """
        self.run(lambda: restore({**saved, "cuda": []}))

    def _put_in_place(self) -> None:
        numpy = _UNTYPED.get_bit_generator()
        global_states = (
            random.getstate(),
            torch.get_rng_state(),
            numpy,
            _kept_normal(self._known_states),
        )
        python, chance, normal = self._own_states
        self._is_taken = True  # until all are in place, so that an interrupt here loses nothing
        self._global_states = global_states
        random.setstate(python)
        torch.set_rng_state(chance)
        _replace_numpy(self._bits, normal)
        self._began = _memory(_NUMPY)
        self._is_taken = False

    def _put_back(self) -> None:
        """Put the global generators back, unless that is done; each line may be repeated."""
        if self._global_states is None:
            return
        if not self._is_taken:
            normal = _kept_normal((self._began, self._own_states[2]))
            self._own_states = random.getstate(), torch.get_rng_state(), normal
            self._is_taken = True
        python, chance, numpy, normal = self._global_states
        random.setstate(python)
        torch.set_rng_state(chance)
        _replace_numpy(numpy, normal)
        self._known_states = _memory(_NUMPY), normal
        self._global_states = None


def _digest(states: Mapping[str, Any]) -> bytes:
    """Return 32 bytes that follow from states of generators."""
    digest = hashlib.sha256(b"recpoint: generators of its own")
    python, numpy = states["python"], states["numpy"]
    for array in (python["words"], numpy["keys"], states["torch"].numpy()):
        digest.update(array.tobytes())
    digest.update(repr((python["gauss"], numpy["position"], numpy["has_gauss"])).encode())
    return digest.digest()


def _replace_numpy(bits: Any, normal: float | None) -> None:
    """Have numpy's global `RandomState` draw from `bits`, and keep `normal` for its next draw."""
    _UNTYPED.set_bit_generator(bits)  # forgets the kept number
    if normal is not None:
        state = np.random.get_state(legacy=False)
        np.random.set_state({**state, "has_gauss": 1, "gauss": normal})


def _kept_normal(known_state: tuple[bytes, float | None] | None) -> float | None:
    """Return the normal number that numpy's global `RandomState` keeps for its next draw, if any.

    It draws two at a time. Asking it takes 50 µs, because it copies the state of its bit generator.

    Args:
        known_state: the memory of the object at an earlier time, and the number that it kept then.
    """
    if known_state is not None and _SHOWS_NORMAL and _memory(_NUMPY) == known_state[0]:
        return known_state[1]
    state = np.random.get_state(legacy=False)
    return float(state["gauss"]) if state["has_gauss"] else None


def _memory(generator: np.random.RandomState) -> bytes:
    """Return the object's own memory, which holds the number that it keeps.

    Only compared: equal memory means an equal number. It begins after the reference count.
    """
    head = object.__basicsize__
    return ctypes.string_at(id(generator) + head, type(generator).__basicsize__ - head)


def _shows_normal() -> bool:
    """Whether the memory of a `RandomState` differs as soon as it keeps another normal number."""
    generator = np.random.RandomState(0)
    memories = []
    for _ in range(4):
        memories.append(_memory(generator))
        generator.standard_normal()
    return all(memory != next_memory for memory, next_memory in pairwise(memories))


_SHOWS_NORMAL: Final = _shows_normal()
