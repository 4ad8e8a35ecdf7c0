"""Keys of stored objects: the only place that builds or takes apart one (format §2)."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "AttemptName",
    "ChunkName",
    "GENERATIONS_PREFIX",
    "CHUNKS_PREFIX",
    "MANIFESTS_PREFIX",
    "MAX_GENERATION",
    "MAX_STEP",
    "RUN_KEY",
    "attempt_prefix",
    "generation_key",
    "is_chunk_key",
    "is_probe_key",
    "job_stem",
    "manifest_key",
    "parse_attempt_prefix",
    "parse_chunk_key",
    "parse_chunk_name",
    "parse_generation_key",
    "parse_job_stem",
    "parse_manifest_key",
    "row_chunk_key",
    "state_chunk_key",
]

MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**8 - 1
MAX_RANK = 10**5 - 1
MAX_TABLE = 10**5 - 1
MAX_CHUNK = 10**6 - 1

RUN_KEY = "run.json"
GENERATIONS_PREFIX = "generations/"
CHUNKS_PREFIX = "chunks/"
MANIFESTS_PREFIX = "manifests/"

# [0-9] and \Z, not \d and $: the latter let other digits and a final newline through.
_GENERATION = re.compile(r"generations/([0-9]{8})\.json\Z")
_MANIFEST = re.compile(r"manifests/([0-9]{12})-([0-9]{8})\.json\Z")
_ATTEMPT = re.compile(r"chunks/([0-9]{12})-([0-9]{8})-([0-9a-f]{32})/")
_CHUNK = re.compile(
    _ATTEMPT.pattern + r"r([0-9]{5})-(?:t([0-9]{5})|state)-([0-9]{6})\.safetensors\Z"
)
_PROBE = re.compile(r"probe/[0-9a-f]{32}\Z")
_JOB = re.compile(r"([0-9]{8})-([0-9]{12})-r([0-9]{5})\Z")


class AttemptName(NamedTuple):
    """What an attempt prefix says."""

    step: int
    generation: int
    attempt: str


class ChunkName(NamedTuple):
    """What the last part of a chunk's key says; `table` is None for a state chunk."""

    rank: int
    table: int | None
    number: int


def _within(name: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise ValueError(f"{name} {value} is outside {lowest} … {highest}")
    return value


def generation_key(generation: int) -> str:
    """Key of a generation record."""
    return f"generations/{_within('generation', generation, 1, MAX_GENERATION):08d}.json"


def parse_generation_key(key: str) -> int | None:
    """Generation of a generation record's key; None if `key` is not one."""
    match = _GENERATION.match(key)
    return int(match[1]) if match and int(match[1]) > 0 else None


def manifest_key(step: int, generation: int) -> str:
    """Key of a manifest."""
    _within("step", step, 0, MAX_STEP)
    _within("generation", generation, 1, MAX_GENERATION)
    return f"manifests/{step:012d}-{generation:08d}.json"


def parse_manifest_key(key: str) -> tuple[int, int] | None:
    """(step, generation) of a manifest's key; None if `key` is not one."""
    match = _MANIFEST.match(key)
    return (int(match[1]), int(match[2])) if match and int(match[2]) > 0 else None


def attempt_prefix(step: int, generation: int, attempt: str) -> str:
    """Prefix, ending in a slash, of all chunks of one attempt."""
    _within("step", step, 0, MAX_STEP)
    _within("generation", generation, 1, MAX_GENERATION)
    prefix = f"chunks/{step:012d}-{generation:08d}-{attempt}/"
    if not _ATTEMPT.fullmatch(prefix):
        raise ValueError(f"attempt {attempt!r} is not 32 lower-case hexadecimal digits")
    return prefix


def row_chunk_key(
    step: int, generation: int, attempt: str, *, rank: int, table: int, number: int
) -> str:
    """Key of row chunk `number` of table `table`."""
    _within("rank", rank, 0, MAX_RANK)
    _within("table", table, 0, MAX_TABLE)
    _within("chunk number", number, 0, MAX_CHUNK)
    prefix = attempt_prefix(step, generation, attempt)
    return f"{prefix}r{rank:05d}-t{table:05d}-{number:06d}.safetensors"


def state_chunk_key(step: int, generation: int, attempt: str, *, rank: int, number: int) -> str:
    """Key of state chunk `number`."""
    _within("rank", rank, 0, MAX_RANK)
    _within("chunk number", number, 0, MAX_CHUNK)
    return f"{attempt_prefix(step, generation, attempt)}r{rank:05d}-state-{number:06d}.safetensors"


def is_chunk_key(key: str) -> bool:
    """Whether `key` is the key of a row or state chunk."""
    return _CHUNK.match(key) is not None


def is_probe_key(key: str) -> bool:
    """Whether `key` is that of a trial of create-only writes, which is removed right after it."""
    return _PROBE.match(key) is not None


def parse_chunk_key(key: str) -> AttemptName | None:
    """The attempt that a chunk's key lies under; None if `key` is not a chunk's."""
    match = _CHUNK.match(key)
    return AttemptName(int(match[1]), int(match[2]), match[3]) if match else None


def parse_chunk_name(key: str) -> ChunkName | None:
    """Rank, table and number in a chunk's key; None if `key` is not a chunk's."""
    match = _CHUNK.match(key)
    if not match:
        return None
    return ChunkName(int(match[4]), int(match[5]) if match[5] else None, int(match[6]))


def parse_attempt_prefix(key: str) -> AttemptName | None:
    """The attempt whose prefix `key` starts with; None if it starts with none."""
    match = _ATTEMPT.match(key)
    return AttemptName(int(match[1]), int(match[2]), match[3]) if match else None


def job_stem(generation: int, step: int, rank: int) -> str:
    """File name, without ending, of a job and of its outcome in the staging area (format §7)."""
    _within("generation", generation, 1, MAX_GENERATION)
    _within("step", step, 0, MAX_STEP)
    _within("rank", rank, 0, MAX_RANK)
    return f"{generation:08d}-{step:012d}-r{rank:05d}"


def parse_job_stem(stem: str) -> tuple[int, int, int] | None:
    """(generation, step, rank) of a job's file stem; None if it is not one."""
    match = _JOB.match(stem)
    return (int(match[1]), int(match[2]), int(match[3])) if match and int(match[1]) else None
