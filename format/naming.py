"""Keys of stored objects: the only place that builds or takes apart one (format §2)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Literal, NamedTuple, cast

__all__ = [
    "FEW_OF_A_GENERATION",
    "AttemptName",
    "ChunkName",
    "ConsolidatedName",
    "Content",
    "GENERATIONS_PREFIX",
    "CHUNKS_PREFIX",
    "CONSOLIDATED_PREFIX",
    "DELETION_KEY",
    "EXPIRED_PREFIX",
    "LEASES_PREFIX",
    "MANIFESTS_PREFIX",
    "MAX_GENERATION",
    "MAX_PUBLICATION",
    "MAX_STEP",
    "MAX_VALIDATION",
    "METRICS_PREFIX",
    "PINS_PREFIX",
    "PLAN_KEY",
    "PUBLISHED_PREFIX",
    "REJECTIONS_PREFIX",
    "RUN_KEY",
    "NamedCheckpoint",
    "PARTS_PREFIX",
    "PartName",
    "VALIDATIONS_PREFIX",
    "ValidationLevel",
    "ValidationName",
    "ValidationResult",
    "attempt_prefix",
    "consolidated_key",
    "consolidated_prefix",
    "end_key",
    "expired_key",
    "generation_in_key",
    "generation_key",
    "is_end_key",
    "is_label",
    "is_probe_key",
    "is_retention_key",
    "job_stem",
    "lease_key",
    "manifest_key",
    "metric_key",
    "parse_chunk_key",
    "parse_chunk_name",
    "parse_expired_key",
    "parse_consolidated_key",
    "parse_generation_key",
    "parse_job_stem",
    "parse_lease_key",
    "parse_manifest_key",
    "parse_metric_key",
    "parse_part_key",
    "parse_pin_key",
    "parse_publication_key",
    "parse_rejections_key",
    "part_key",
    "part_prefix",
    "pin_key",
    "publication_key",
    "rejections_key",
    "parse_validation_key",
    "row_chunk_key",
    "sample_chunk_key",
    "shared_attempt",
    "state_chunk_key",
    "validation_key",
]

MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**8 - 1
MAX_RANK = 10**5 - 1
MAX_TABLE = 10**5 - 1
MAX_CHUNK = 10**6 - 1
MAX_VALIDATION = 10**6 - 1
MAX_PUBLICATION = 10**8 - 1

RUN_KEY = "run.json"
GENERATIONS_PREFIX = "generations/"
ENDS_PREFIX = "ends/"
CHUNKS_PREFIX = "chunks/"
PARTS_PREFIX = "parts/"
MANIFESTS_PREFIX = "manifests/"
PINS_PREFIX = "pins/"
METRICS_PREFIX = "metrics/"
EXPIRED_PREFIX = "expired/"
LEASES_PREFIX = "leases/"
DELETION_KEY = "deletion.json"
PLAN_KEY = "retention.json"
CONSOLIDATED_PREFIX = "consolidated/"
VALIDATIONS_PREFIX = "validations/"
PUBLISHED_PREFIX = "published/"
REJECTIONS_PREFIX = "rejections/"

# [0-9] and \Z, not \d and $: the latter let other digits and a final newline through.
_STEP = r"([0-9]{12})"
_GENERATION = r"((?!0{8})[0-9]{8})"  # from 1: what a parser lets through, a key can be built of
_RECORD = re.compile(rf"generations/{_GENERATION}\.json\Z")
_END = re.compile(rf"ends/{_GENERATION}\.json\Z")
_MANIFEST = re.compile(rf"manifests/{_STEP}-{_GENERATION}\.json\Z")
_CONSOLIDATED = re.compile(rf"consolidated/{_STEP}-{_GENERATION}-(?:full|after-{_STEP})\.json\Z")
_ATTEMPT = re.compile(rf"chunks/{_STEP}-{_GENERATION}-([0-9a-f]{{32}})/")
_CHUNK = re.compile(
    _ATTEMPT.pattern + r"r([0-9]{5})-(?:t([0-9]{5})|(state|sample))-([0-9]{6})\.safetensors\Z"
)
_PART = re.compile(rf"parts/{_STEP}-{_GENERATION}-([0-9a-f]{{32}})/r([0-9]{{5}})\.json\Z")
_VALIDATION = re.compile(
    rf"validations/{_STEP}-{_GENERATION}-((?!0{{6}})[0-9]{{6}})-(metadata|sample|full)-"
    r"(passed|failed|stateless)\.json\Z"
)
_PROBE = re.compile(r"probe/[0-9a-f]{32}\Z")
_LABEL = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}\Z")
_NAMED = re.compile(
    rf"(?:pins|metrics)/{_STEP}-{_GENERATION}-([a-z0-9][a-z0-9_.-]{{0,63}})\.json\Z"
)
_PUBLISHED = re.compile(r"published/((?!0{8})[0-9]{8})\.json\Z")
_REJECTIONS = re.compile(r"rejections/r([0-9]{5})\.json\Z")
_LEASE = re.compile(r"leases/([0-9a-f]{32})\.json\Z")
_JOB = re.compile(rf"{_GENERATION}-{_STEP}-r([0-9]{{5}})\Z")


#: What a chunk holds (format §3).
Content = Literal["rows", "state", "sample"]

#: How much a validation looked at, and what came of it (format §10).
ValidationLevel = Literal["metadata", "sample", "full"]
ValidationResult = Literal["passed", "failed", "stateless"]


class ConsolidatedName(NamedTuple):
    """What a consolidated manifest's key says; `after` is its parent's step, None for a full."""

    step: int
    generation: int
    after: int | None


class AttemptName(NamedTuple):
    """What an attempt prefix says."""

    step: int
    generation: int
    attempt: str


class ChunkName(NamedTuple):
    """What the last part of a chunk's key says; `table` is None where it holds no rows of one."""

    content: Content
    rank: int
    table: int | None
    number: int


class PartName(NamedTuple):
    """What the key of a rank's part says."""

    step: int
    generation: int
    attempt: str
    rank: int

    @property
    def checkpoint(self) -> AttemptName:
        """Of which attempt it is a part."""
        return AttemptName(self.step, self.generation, self.attempt)


class NamedCheckpoint(NamedTuple):
    """What the key of a pin or of a metric says: of which checkpoint, and what it is called."""

    step: int
    generation: int
    name: str


class ValidationName(NamedTuple):
    """What the key of a validation record says."""

    step: int
    generation: int
    number: int
    level: ValidationLevel
    result: ValidationResult


def _within(name: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise ValueError(f"{name} {value} is outside {lowest} … {highest}")
    return value


def generation_key(generation: int) -> str:
    """Key of a generation record."""
    return f"generations/{_within('generation', generation, 1, MAX_GENERATION):08d}.json"


def parse_generation_key(key: str) -> int | None:
    """Generation of a generation record's key; None if `key` is not one."""
    match = _RECORD.match(key)
    return int(match[1]) if match else None


def end_key(generation: int) -> str:
    """Key of the word that a generation's trainer has ended."""
    return f"ends/{_within('generation', generation, 1, MAX_GENERATION):08d}.json"


def is_end_key(key: str) -> bool:
    """Whether `key` is that of an end record."""
    return _parse_end_key(key) is not None


def _parse_end_key(key: str) -> int | None:
    match = _END.match(key)
    return int(match[1]) if match else None


def manifest_key(step: int, generation: int) -> str:
    """Key of a manifest."""
    _within("step", step, 0, MAX_STEP)
    _within("generation", generation, 1, MAX_GENERATION)
    return f"manifests/{step:012d}-{generation:08d}.json"


def parse_manifest_key(key: str) -> tuple[int, int] | None:
    """(step, generation) of a manifest's key; None if `key` is not one."""
    match = _MANIFEST.match(key)
    return (int(match[1]), int(match[2])) if match else None


def consolidated_prefix(step: int, generation: int) -> str:
    """What the keys of all consolidated manifests of one checkpoint start with."""
    _within("step", step, 0, MAX_STEP)
    _within("generation", generation, 1, MAX_GENERATION)
    return f"consolidated/{step:012d}-{generation:08d}-"


def consolidated_key(step: int, generation: int, after: int | None) -> str:
    """Key of a consolidated manifest: a full, or an increment on the parent at step `after`."""
    prefix = consolidated_prefix(step, generation)
    if after is None:
        return f"{prefix}full.json"
    return f"{prefix}after-{_within('parent step', after, 0, step - 1):012d}.json"


def parse_consolidated_key(key: str) -> ConsolidatedName | None:
    """What a consolidated manifest's key says; None if `key` is not one."""
    match = _CONSOLIDATED.match(key)
    if not match:
        return None
    name = ConsolidatedName(int(match[1]), int(match[2]), int(match[3]) if match[3] else None)
    return name if name.after is None or name.after < name.step else None


def is_label(name: str) -> bool:
    """Whether `name` may be that of a pin or of a metric."""
    return _LABEL.match(name) is not None


def pin_key(step: int, generation: int, name: str) -> str:
    """Key of a pin."""
    return _named_key(PINS_PREFIX, step, generation, name)


def metric_key(step: int, generation: int, name: str) -> str:
    """Key of a metric."""
    return _named_key(METRICS_PREFIX, step, generation, name)


def _named_key(prefix: str, step: int, generation: int, name: str) -> str:
    _within("step", step, 0, MAX_STEP)
    _within("generation", generation, 1, MAX_GENERATION)
    if not is_label(name):
        raise ValueError(f"{name[:80]!r} is not 1 to 64 of a-z, 0-9, _, ., -")
    return f"{prefix}{step:012d}-{generation:08d}-{name}.json"


def parse_pin_key(key: str) -> NamedCheckpoint | None:
    """What a pin's key says; None if `key` is not one."""
    return _parse_named(PINS_PREFIX, key)


def parse_metric_key(key: str) -> NamedCheckpoint | None:
    """What a metric's key says; None if `key` is not one."""
    return _parse_named(METRICS_PREFIX, key)


def _parse_named(prefix: str, key: str) -> NamedCheckpoint | None:
    match = _NAMED.match(key)
    if not match or not key.startswith(prefix):
        return None
    return NamedCheckpoint(int(match[1]), int(match[2]), match[3])


def expired_key(manifest: str) -> str:
    """Key of the mark of the manifest under the key `manifest`."""
    key = EXPIRED_PREFIX + manifest.rpartition("/")[2]
    if parse_expired_key(key) != manifest:
        raise ValueError(f"{manifest[:80]!r} is not the key of a manifest")
    return key


def parse_expired_key(key: str) -> str | None:
    """Key of the manifest that a mark is of; None if `key` is not a mark's."""
    if not key.startswith(EXPIRED_PREFIX):
        return None
    name = key.removeprefix(EXPIRED_PREFIX)
    if parse_manifest_key(MANIFESTS_PREFIX + name) is not None:
        return MANIFESTS_PREFIX + name
    if parse_consolidated_key(CONSOLIDATED_PREFIX + name) is not None:
        return CONSOLIDATED_PREFIX + name
    return None


def lease_key(owner: str) -> str:
    """Key of the lease of `owner`."""
    key = f"{LEASES_PREFIX}{owner}.json"
    if parse_lease_key(key) is None:
        raise ValueError(f"owner {owner!r} is not 32 lower-case hexadecimal digits")
    return key


def parse_lease_key(key: str) -> str | None:
    """Owner of a lease; None if `key` is not a lease's."""
    match = _LEASE.match(key)
    return match[1] if match else None


def publication_key(number: int) -> str:
    """Key of a publication record."""
    return f"published/{_within('publication', number, 1, MAX_PUBLICATION):08d}.json"


def parse_publication_key(key: str) -> int | None:
    """Number of a publication record; None if `key` is not one's."""
    match = _PUBLISHED.match(key)
    return int(match[1]) if match else None


def rejections_key(rank: int) -> str:
    """Key of what was rejected of a rank."""
    return f"{REJECTIONS_PREFIX}r{_within('rank', rank, 0, MAX_RANK):05d}.json"


def parse_rejections_key(key: str) -> int | None:
    """Rank in the key of what was rejected of one; None if `key` is not such a key."""
    match = _REJECTIONS.match(key)
    return int(match[1]) if match else None


def is_retention_key(key: str) -> bool:
    """Whether `key` is that of a pin, metric, mark, lease, plan, deletion or publication."""
    parsers = (parse_pin_key, parse_metric_key, parse_expired_key, parse_lease_key)
    known = any(parse(key) is not None for parse in parsers)
    return known or key in (DELETION_KEY, PLAN_KEY) or parse_publication_key(key) is not None


def validation_key(name: ValidationName) -> str:
    """Key of a validation record."""
    _within("step", name.step, 0, MAX_STEP)
    _within("generation", name.generation, 1, MAX_GENERATION)
    _within("validation", name.number, 1, MAX_VALIDATION)
    checkpoint = f"{name.step:012d}-{name.generation:08d}"
    return f"validations/{checkpoint}-{name.number:06d}-{name.level}-{name.result}.json"


def parse_validation_key(key: str) -> ValidationName | None:
    """What a validation record's key says; None if `key` is not one."""
    match = _VALIDATION.match(key)
    if match is None:
        return None
    return ValidationName(
        int(match[1]),
        int(match[2]),
        int(match[3]),
        cast(ValidationLevel, match[4]),
        cast(ValidationResult, match[5]),
    )


def attempt_prefix(step: int, generation: int, attempt: str) -> str:
    """Prefix, ending in a slash, of all chunks of one attempt."""
    _within("step", step, 0, MAX_STEP)
    _within("generation", generation, 1, MAX_GENERATION)
    prefix = f"chunks/{step:012d}-{generation:08d}-{attempt}/"
    if not _ATTEMPT.fullmatch(prefix):
        raise ValueError(f"attempt {attempt!r} is not 32 lower-case hexadecimal digits")
    return prefix


def shared_attempt(token: str, step: int, *, cut: int) -> str:
    """The attempt that all ranks of a checkpoint call it by, without asking each other.

    Args:
        token: of the record of their generation.
        step: of the checkpoint.
        cut: how many checkpoints they have cut together since that generation began, this one
            counted: a step that is cut again is another attempt.
    """
    said = f"recpoint attempt|{token}|{_within('step', step, 0, MAX_STEP)}|{cut}"
    return hashlib.sha256(said.encode("ascii")).hexdigest()[:32]


def part_prefix(step: int, generation: int, attempt: str) -> str:
    """Prefix, ending in a slash, of the parts of one attempt."""
    return PARTS_PREFIX + attempt_prefix(step, generation, attempt).removeprefix(CHUNKS_PREFIX)


def part_key(step: int, generation: int, attempt: str, *, rank: int) -> str:
    """Key of the part of one rank."""
    return f"{part_prefix(step, generation, attempt)}r{_within('rank', rank, 0, MAX_RANK):05d}.json"


def parse_part_key(key: str) -> PartName | None:
    """What the key of a part says; None if `key` is not one."""
    match = _PART.match(key)
    if match is None:
        return None
    return PartName(int(match[1]), int(match[2]), match[3], int(match[4]))


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
    return _tableless_key(step, generation, attempt, rank, number, "state")


def sample_chunk_key(step: int, generation: int, attempt: str, *, rank: int, number: int) -> str:
    """Key of sample chunk `number`."""
    return _tableless_key(step, generation, attempt, rank, number, "sample")


def _tableless_key(
    step: int, generation: int, attempt: str, rank: int, number: int, content: Content
) -> str:
    """Key of a chunk that is not of one table."""
    _within("rank", rank, 0, MAX_RANK)
    _within("chunk number", number, 0, MAX_CHUNK)
    prefix = attempt_prefix(step, generation, attempt)
    return f"{prefix}r{rank:05d}-{content}-{number:06d}.safetensors"


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
    content: Content = "rows"
    if match[6]:
        content = "state" if match[6] == "state" else "sample"
    return ChunkName(content, int(match[4]), int(match[5]) if match[5] else None, int(match[7]))


def job_stem(generation: int, step: int, rank: int) -> str:
    """File name, without ending, of a job and of its outcome in the staging area (format §7)."""
    _within("generation", generation, 1, MAX_GENERATION)
    _within("step", step, 0, MAX_STEP)
    _within("rank", rank, 0, MAX_RANK)
    return f"{generation:08d}-{step:012d}-r{rank:05d}"


def parse_job_stem(stem: str) -> tuple[int, int, int] | None:
    """(generation, step, rank) of a job's file stem; None if it is not one."""
    match = _JOB.match(stem)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


_Named = (
    tuple[int, int] | ConsolidatedName | AttemptName | PartName | NamedCheckpoint | ValidationName
)
#: Parsers of the keys that name a checkpoint, step and generation first, by their first part.
_OF_A_CHECKPOINT: dict[str, Callable[[str], _Named | None]] = {
    "chunks": parse_chunk_key,
    "parts": parse_part_key,
    "manifests": parse_manifest_key,
    "consolidated": parse_consolidated_key,
    "pins": parse_pin_key,
    "metrics": parse_metric_key,
    "validations": parse_validation_key,
}

#: Where the keys lie that name a generation and are few: not the chunks, which are a store's most.
FEW_OF_A_GENERATION = (
    GENERATIONS_PREFIX,
    ENDS_PREFIX,
    EXPIRED_PREFIX,
    *(f"{kind}/" for kind in _OF_A_CHECKPOINT if kind != "chunks"),
)


def generation_in_key(key: str) -> int | None:
    """The generation that a key names, of whatever kind it is; None if it names none.

    A key that is not ours names none (format §2), also where it begins as one: a copy of a
    manifest beside it, with `.bak` at its end, takes no number from any trainer.
    """
    if key.startswith(GENERATIONS_PREFIX):
        return parse_generation_key(key)
    if key.startswith(ENDS_PREFIX):
        return _parse_end_key(key)
    of_a_checkpoint = parse_expired_key(key) or key
    parse = _OF_A_CHECKPOINT.get(of_a_checkpoint.partition("/")[0])
    name = None if parse is None else parse(of_a_checkpoint)
    return None if name is None else name[1]
