"""What a committed checkpoint is, for the trainer and for who reports it."""

from __future__ import annotations

from typing import NamedTuple

from recpoint.catalog.runs.chain import resolve_chain
from recpoint.catalog.runs.run import Run
from recpoint.errors import ChainError, FormatError, ObjectNotFound
from recpoint.format.manifest import Manifest, Quantizer
from recpoint.format.naming import ManifestName

__all__ = ["Committed", "committed"]


class Committed(NamedTuple):
    """What a commit did: bytes of all chunks, their number, and when it was, for the lag.

    `rank_bytes`: of the chunks of one rank. `links_to_read`: manifests that a restore of it reads.
    `quantizers`: what its tables were quantized with, by that rank.
    """

    stored_bytes: int
    rank_bytes: int
    chunks: int
    committed_ms: int
    links_to_read: int
    quantizers: tuple[Quantizer, ...]


def committed(run: Run, manifest: Manifest, rank: int) -> Committed:
    """What is told of a checkpoint that is there, to the rank `rank` of its trainer."""
    return Committed(
        manifest.stored_bytes,
        sum(entry.bytes for entry in manifest.chunks if entry.rank == rank),
        len(manifest.chunks),
        manifest.committed_ms,
        _links_to_read(run, manifest),
        tuple(quantizer for quantizer in manifest.quantizers if quantizer.rank == rank),
    )


def _links_to_read(run: Run, manifest: Manifest) -> int:
    """Manifests that a restore of this checkpoint would read now."""
    as_taken = manifest.links.chain_length
    if as_taken == 1 or not run.consolidated():
        return as_taken
    try:
        chain = resolve_chain(run, ManifestName(manifest.step, manifest.generation))
    except (ChainError, FormatError, ObjectNotFound):
        return as_taken  # it is committed all the same, and a check says what is wrong before it
    return len(chain.manifests)
