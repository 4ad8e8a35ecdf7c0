"""Captures and restores the process's random generators: Python, numpy, torch, each CUDA device."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from recpoint.errors import SettingsError

__all__ = ["capture", "restore", "seed", "untouched"]


_log = logging.getLogger("recpoint")


def capture() -> dict[str, Any]:
    """Return the state of all global generators, without drawing from any of them.

    Raises:
        SettingsError: numpy's global generator is not numpy's default kind, MT19937.
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
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
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
        "cuda": list(cuda),
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
