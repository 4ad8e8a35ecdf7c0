"""Compares a soak's checkpoints with the true states by step, and records all manifests seen."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak_training import Training
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.errors import ObjectNotFound, RecpointError, StoreError
from recpoint.format.naming import CONSOLIDATED_KEY, EXPIRED_KEY, MANIFEST_KEY, ManifestName
from recpoint.format.records import MAX_RECORD_BYTES, unpack_record
from recpoint.format.retention_records import Mark
from recpoint.trainer_plugin.restore.target import ModelTarget
from recpoint.trainer_plugin.state.model import ModelState
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.training_state import TrainingState
from recpoint.trainer_plugin.tables import find_tables

__all__ = ["Ledger", "read_truth", "restored_digest"]


_GENERATORS = threading.Lock()


def read_truth(file: Path) -> dict[int, str]:
    """Read the truth's digests by step, as far as its trainer has come."""
    whole = [line for line in file.read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["digest"] for line in map(json.loads, whole)}


def restored_digest(run: Run, name: ManifestName) -> str:
    """Restore a checkpoint into a fresh model, as a trainer does, and return its digest.

    This changes the process's random generators, which the digest covers, so only one thread may
    call it at a time.

    Raises:
        RecpointError: the checkpoint does not restore.
    """
    with _GENERATORS:
        training = Training()
        tables = find_tables(training.model, training.optimizers).tables
        state = TrainingState(
            model=ModelState(training.model, tables),
            optimizers=OptimizerState(training.model, training.optimizers, tables),
            schedulers=(),
            reader=training.reader,
            extras={},
        )
        target = ModelTarget(tables, state, since_full=False)
        restore(run, target, Selection.of(name))
        return training.digest()


@dataclass
class Ledger:
    """Records every manifest that was seen, and the reasons for which manifests were deleted.

    Attributes:
        run: whose store is listed.
        seen: key of each manifest, consolidated ones too -> its checkpoint.
        there: the keys in the last listing.
        reasons: key of a manifest -> why retention marked it.
        bytes_by_look: bytes of all objects in each listing.
        most_manifests: the most manifests in one listing.
    """

    run: Run
    seen: dict[str, ManifestName] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    bytes_by_look: list[int] = field(default_factory=list)
    most_manifests: int = 0

    def look(self) -> None:
        """List the store once, and update the record.

        Raises:
            RecpointError: the store does not answer.
        """
        objects: dict[str, ObjectInfo] = {info.key: info for info in self.run.store.list()}
        keys: set[str] = set()
        for key in objects:
            name = _checkpoint_of(key)
            if name is not None:
                self.seen[key] = name
                keys.add(key)
        for key in keys - self.reasons.keys():
            if EXPIRED_KEY.of(key) in objects:
                self._read_reason(key)
        self.there = keys
        self.bytes_by_look.append(sum(info.size_bytes for info in objects.values()))
        self.most_manifests = max(self.most_manifests, len(keys))

    @property
    def committed(self) -> list[ManifestName]:
        """Return all checkpoints that were ever committed, in order."""
        own_names = [name for key, name in self.seen.items() if key.startswith(MANIFEST_KEY.prefix)]
        return sorted(own_names)

    @property
    def restorable(self) -> list[ManifestName]:
        """Return the checkpoints that had a manifest in the last listing."""
        return sorted({self.seen[key] for key in self.there})

    @property
    def gone_without_reason(self) -> list[str]:
        """Return manifests that are gone although no mark of retention was seen for them."""
        return sorted(self.seen.keys() - self.there - self.reasons.keys())

    def wrong(self, name: ManifestName, truth: dict[int, str]) -> str | None:
        """Say how a checkpoint differs from the truth; None: it does not, or retention deleted it.

        Raises:
            StoreError: the store does not answer.
        """
        try:
            digest = restored_digest(self.run, name)
        except ObjectNotFound as error:
            self.look()
            return str(error) if name in self.restorable else None
        except StoreError:
            raise
        except RecpointError as error:
            return str(error)
        return None if digest == truth.get(name.step) else f"{name}: other contents than the truth"

    def _read_reason(self, key: str) -> None:
        try:
            data = self.run.store.get(EXPIRED_KEY.of(key), max_bytes=MAX_RECORD_BYTES)
        except ObjectNotFound:
            return  # the mark was withdrawn, or the manifest is already deleted
        mark = unpack_record(
            Mark, data, name=EXPIRED_KEY.of(key), next_step="look at the soak's log"
        )
        self.reasons[key] = mark.reason


def _checkpoint_of(key: str) -> ManifestName | None:
    name = MANIFEST_KEY.parse(key)
    if name is not None:
        return ManifestName(*name)
    merged = CONSOLIDATED_KEY.parse(key)
    return None if merged is None else ManifestName(merged.step, merged.generation)
