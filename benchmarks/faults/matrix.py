"""The 25 faults, and the cells of the matrix: each fault against each system."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Final

from benchmarks.faults import damage, interruptions, races, services
from benchmarks.faults.system import System
from benchmarks.faults.trials import Broken, Trials, not_applicable
from benchmarks.faults.verdicts import Verdict

__all__ = ["FAULTS", "SYSTEMS", "cell", "system_of"]

#: Fault -> what tries it. Of the list that this comes from, 503, throttling, time-outs and resets
#: are one fault, and every other entry is one by itself.
FAULTS: Final[Mapping[str, Callable[[Trials], Verdict]]] = {
    "writer thread dies": interruptions.writer_dies,
    "bit flip": damage.bit_flip,
    "truncation": damage.truncation,
    "kill in an overwrite": interruptions.killed_in_an_overwrite,
    "kill at every I/O boundary": interruptions.killed_at_each_boundary,
    "missing increment": partial(damage.disturbed, what="missing increment"),
    "duplicate increment": partial(damage.disturbed, what="duplicate increment"),
    "out-of-order increment": partial(damage.disturbed, what="out-of-order increment"),
    "stale files of an earlier run": interruptions.stale_files,
    "two writers commit one step": races.two_writers,
    "retention racing a save": races.retention_in_a_save,
    "retention racing a restore": races.retention_in_a_restore,
    "retention racing a consolidation": races.retention_in_a_consolidation,
    "503, throttling, time-outs, resets": services.troubled_requests,
    "store dies in an upload": services.store_dies,
    "disk full in staging": interruptions.disk_full,
    "clock skew": interruptions.clock_skew,
    "workflow engine down": services.engine_down,
    "worker killed": interruptions.worker_killed,
    "path traversal": partial(damage.falsified, what="path traversal"),
    "huge sizes": partial(damage.falsified, what="huge sizes"),
    "negative offsets": partial(damage.falsified, what="negative offsets"),
    "overlapping ranges": partial(damage.falsified, what="overlapping ranges"),
    "wrong digest": partial(damage.falsified, what="wrong digest"),
    "unknown version": partial(damage.falsified, what="unknown version"),
}

#: Name of a system -> its module and class.
SYSTEMS: Final[Mapping[str, tuple[str, str]]] = {
    "recpoint": ("recpoint", "Recpoint"),
    "dcp_sync": ("dcp", "DcpSync"),
    "dcp_async": ("dcp", "DcpAsync"),
    "torch_save": ("torch_save", "TorchSave"),
    "torch_checkpointing": ("torch_checkpointing", "TorchCheckpointing"),
    "orbax": ("orbax", "Orbax"),
    "torchsnapshot": ("torchsnapshot", "Torchsnapshot"),
    "lightning": ("lightning", "Lightning"),
    "torchrec": ("torchrec", "Torchrec"),
}


def system_of(name: str) -> type[System]:
    """Return the class of a system; nothing of the system is imported."""
    module, kind = SYSTEMS[name]
    system: type[System] = getattr(import_module(f"benchmarks.faults.systems.{module}"), kind)
    return system


def cell(trials: Trials, fault: str) -> Verdict:
    """Measure one cell."""
    reason = trials.kind.lacks.get(fault)
    if reason is not None:
        return not_applicable(reason)
    try:
        return FAULTS[fault](trials)
    except Broken as error:
        return not_applicable(f"not run: {error}"[:300])
