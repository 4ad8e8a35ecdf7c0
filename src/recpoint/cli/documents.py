"""The JSON forms of what commands print. Times are milliseconds, sizes bytes, as in the format."""

from __future__ import annotations

from typing import Any

from recpoint.catalog.records.validations import Verdict
from recpoint.dashboards.terminal import Listed
from recpoint.errors import RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName

__all__ = ["checkpoint", "details", "listed", "validation"]


def checkpoint(manifest: Manifest) -> dict[str, Any]:
    """What a listing says of one checkpoint."""
    return {
        "step": manifest.step,
        "generation": manifest.generation,
        "attempt": manifest.attempt,
        "kind": manifest.kind,
        "chain_length": manifest.chain_length,
        "policy": manifest.policy,
        "consolidated": manifest.stands_for is not None,
        "dirty_rows": manifest.dirty_rows,
        "stored_bytes": manifest.stored_bytes,
        "full_bytes": manifest.full_bytes,
        "stall_ms": manifest.stall_us / 1000,
        "lag_ms": manifest.committed_ms - manifest.snapshot_ms,
        "committed_ms": manifest.committed_ms,
    }


def listed(entry: Listed) -> dict[str, Any]:
    """One line of a listing, also of a checkpoint whose manifest cannot be read."""
    if isinstance(entry.manifest, RecpointError):
        problem = {"error": type(entry.manifest).__name__, "message": str(entry.manifest)}
        return {**_name(entry.name), **_standing(entry), **problem}
    return {**checkpoint(entry.manifest), **_standing(entry)}


def validation(verdict: Verdict | None) -> dict[str, Any] | None:
    """What validations say of a checkpoint; None: there was none."""
    return None if verdict is None else verdict._asdict()


def details(manifest: Manifest, chain: list[Manifest] | None) -> dict[str, Any]:
    """All there is to say of one checkpoint; `chain` None: it does not join up."""
    return {
        **checkpoint(manifest),
        "run": manifest.run,
        "ranks": manifest.ranks,
        "snapshot_ms": manifest.snapshot_ms,
        "staged_ms": manifest.staged_ms,
        "writer": manifest.writer,
        "tables": [table.model_dump(mode="json") for table in manifest.tables],
        "chunks": [chunk.model_dump(mode="json") for chunk in manifest.chunks],
        "quantizers": [quantizer.model_dump(mode="json") for quantizer in manifest.quantizers],
        "quantized_by": manifest.quantized_by,
        "state_bits": manifest.state_bits,
        "history": manifest.history.model_dump(mode="json"),
        "chain": None if chain is None else [checkpoint(member) for member in chain],
    }


def _standing(entry: Listed) -> dict[str, Any]:
    return {
        "live": entry.live,
        "merged": list(entry.merged),
        "pins": list(entry.pins),
        "expires": entry.expires,
        "validation": validation(entry.verdict),
    }


def _name(name: ManifestName) -> dict[str, Any]:
    return {"step": name.step, "generation": name.generation}
