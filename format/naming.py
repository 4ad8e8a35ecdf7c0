r"""Builds and parses the keys of stored objects; no other module does (format §2).

All patterns use [0-9] and \Z, because \d and $ accept other digits and a final newline.
A pattern accepts only keys that can also be built: for instance, generations count from 1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

__all__ = [
    "CHUNKS_PREFIX",
    "CONSOLIDATED_KEY",
    "DELETION_KEY",
    "END_KEY",
    "EXPIRED_KEY",
    "FEW_OF_A_GENERATION",
    "GENERATION_KEY",
    "LEASE_KEY",
    "MANIFEST_KEY",
    "MAX_GENERATION",
    "MAX_PUBLICATION",
    "MAX_STEP",
    "MAX_VALIDATION",
    "METRIC_KEY",
    "PAGE_KEY",
    "PART_KEY",
    "PIN_KEY",
    "PLAN_KEY",
    "PUBLICATION_KEY",
    "REJECTIONS_KEY",
    "RUN_KEY",
    "VALIDATION_KEY",
    "AttemptName",
    "ChunkName",
    "ConsolidatedName",
    "Content",
    "KeyPattern",
    "ManifestName",
    "NamedCheckpoint",
    "PageName",
    "PartName",
    "ValidationLevel",
    "ValidationName",
    "ValidationResult",
    "attempt_prefix",
    "attempt_prefixes",
    "generation_in_key",
    "is_label",
    "is_probe_key",
    "job_stem",
    "parse_chunk_key",
    "parse_chunk_name",
    "parse_job_stem",
    "rank_prefix",
    "row_chunk_key",
    "sample_chunk_key",
    "shared_attempt",
    "state_chunk_key",
]

MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**8 - 1
_RANK_DIGITS = 5
MAX_RANK = 10**_RANK_DIGITS - 1
MAX_TABLE = 10**5 - 1
MAX_CHUNK = 10**6 - 1
MAX_VALIDATION = 10**6 - 1
MAX_PUBLICATION = 10**8 - 1

CHUNKS_PREFIX = "chunks/"

P = ParamSpec("P")
NameT = TypeVar("NameT", covariant=True)


#: What a chunk holds (format §3).
Content = Literal["rows", "state", "sample"]

#: How much a validation looked at, and its result (format §10).
ValidationLevel = Literal["metadata", "sample", "full"]
ValidationResult = Literal["passed", "failed", "stateless"]


class ManifestName(NamedTuple):
    """A checkpoint's name in keys: its step, and the generation of the trainer that took it."""

    step: int
    generation: int

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation})"


class ConsolidatedName(NamedTuple):
    """The contents of a consolidated manifest's key; `after` is its parent's step, or None."""

    step: int
    generation: int
    after: int | None


class AttemptName(NamedTuple):
    """The contents of an attempt's prefix."""

    step: int
    generation: int
    attempt: str


class ChunkName(NamedTuple):
    """The contents of the last part of a chunk's key; `table` is None for state and samples."""

    content: Content
    rank: int
    table: int | None
    number: int


class PartName(NamedTuple):
    """The contents of the key of a rank's part."""

    step: int
    generation: int
    attempt: str
    rank: int

    @property
    def checkpoint(self) -> AttemptName:
        """The attempt to which the part belongs."""
        return AttemptName(self.step, self.generation, self.attempt)


class PageName(NamedTuple):
    """The contents of the key of a page of a manifest; `digest` is of the page's bytes."""

    step: int
    generation: int
    attempt: str
    digest: str

    @property
    def written_by(self) -> AttemptName:
        """The attempt, or the consolidation, that wrote the page."""
        return AttemptName(self.step, self.generation, self.attempt)


class NamedCheckpoint(NamedTuple):
    """The contents of the key of a pin or a metric: its checkpoint and its name."""

    step: int
    generation: int
    name: str


class ValidationName(NamedTuple):
    """The contents of the key of a validation record."""

    step: int
    generation: int
    number: int
    level: ValidationLevel
    result: ValidationResult


def _within(name: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise ValueError(f"{name} {value} is outside {lowest} … {highest}")
    return value


class _KeyPart(NamedTuple):
    """A part of a key: its pattern, and the conversions between its text and its value.

    `read` may raise ValueError for text that matches; `write` raises it for a value that no key
    can hold.
    """

    looks: str
    read: Callable[[str], Any]
    write: Callable[[Any], str]


def _number(name: str, digits: int, *, lowest: int = 0, mark: str = "") -> _KeyPart:
    zero = "" if lowest == 0 else rf"(?!0{{{digits}}})"

    def write(value: int) -> str:
        return f"{mark}{_within(name, value, lowest, 10**digits - 1):0{digits}d}"

    looks = rf"{mark}{zero}[0-9]{{{digits}}}"
    return _KeyPart(looks, lambda text: int(text.removeprefix(mark)), write)


def _text(name: str, looks: str, expected_text: str) -> _KeyPart:
    pattern = re.compile(rf"(?:{looks})\Z")

    def write(value: str) -> str:
        if not pattern.match(value):
            raise ValueError(f"{name} {value[:80]!r} is not {expected_text}")
        return value

    return _KeyPart(looks, str, write)


class KeyPattern(Generic[P, NameT]):
    """Builds and parses the keys of one kind of record.

    Args:
        name: makes a key's name of the values in the key, in their order; raises ValueError for
            values that no key can hold.
        pieces: the fixed texts and the fields of a key, in their order.

    Attributes:
        prefix: the start of all these keys; the whole key if there is only one.
    """

    def __init__(self, name: Callable[P, NameT], *pieces: str | _KeyPart) -> None:
        self._name = name
        self._pieces = pieces
        looks = (
            re.escape(piece) if isinstance(piece, str) else f"({piece.looks})" for piece in pieces
        )
        self._pattern = re.compile("".join(looks) + r"\Z")
        self._fields = [piece for piece in pieces if isinstance(piece, _KeyPart)]
        self.prefix = self._written(())

    def of(self, *parts: P.args, **named: P.kwargs) -> str:
        """Return the key with these values.

        Raises:
            ValueError: no key can hold them.
        """
        name = self._name(*parts, **named)
        return self._written(name if isinstance(name, tuple) else (name,))

    def parse(self, key: str) -> NameT | None:
        """Return the name in `key`; None if `key` is of another kind."""
        match = self._pattern.match(key)
        if match is None:
            return None
        try:
            texts = zip(self._fields, match.groups(), strict=True)
            read: Callable[..., NameT] = self._name
            return read(*(field.read(text) for field, text in texts))
        except ValueError:
            return None

    def under(self, *first: object) -> str:
        """Return the prefix of all keys whose first values are `first`.

        Raises:
            ValueError: no key can hold them.
        """
        return self._written(first)

    def _written(self, values: tuple[object, ...]) -> str:
        """Return the start of the key up to the first field without a value."""
        text, values_left = "", list(values)
        for piece in self._pieces:
            if isinstance(piece, str):
                text += piece
            elif values_left:
                text += piece.write(values_left.pop(0))
            else:
                return text
        return text


_HEX = "[0-9a-f]{32}"
_STEP = _number("step", 12)
_GENERATION = _number("generation", 8, lowest=1)
_RANK = _number("rank", 5, mark="r")
_ATTEMPT = _text("attempt", _HEX, "32 lower-case hexadecimal digits")
_DIGEST = _text("digest", _HEX, "32 lower-case hexadecimal digits")
_OWNER = _text("owner", _HEX, "32 lower-case hexadecimal digits")
_LABEL = _text("name", "[a-z0-9][a-z0-9_.-]{0,63}", "1 to 64 of a-z, 0-9, _, ., -")
_LEVEL = _text("level", "metadata|sample|full", "the level of a validation")
_RESULT = _text("result", "passed|failed|stateless", "the result of a validation")
_AFTER = _KeyPart(
    r"full|after-[0-9]{12}",
    lambda text: None if text == "full" else int(text.removeprefix("after-")),
    lambda parent_step: "full" if parent_step is None else f"after-{_STEP.write(parent_step)}",
)


def _number_of(number: int) -> int:
    return number


def _owner_of(owner: str) -> str:
    return owner


def _consolidated(step: int, generation: int, parent_step: int | None) -> ConsolidatedName:
    if parent_step is not None:
        _within("parent step", parent_step, 0, step - 1)
    return ConsolidatedName(step, generation, parent_step)


RUN_KEY = "run.json"
DELETION_KEY = "deletion.json"
PLAN_KEY = "retention.json"

GENERATION_KEY = KeyPattern(_number_of, "generations/", _GENERATION, ".json")
#: End records: a trainer says that its generation has ended.
END_KEY = KeyPattern(_number_of, "ends/", _GENERATION, ".json")
MANIFEST_KEY = KeyPattern(ManifestName, "manifests/", _STEP, "-", _GENERATION, ".json")
#: Consolidated manifests: a full, or an increment on the parent at step `after`.
CONSOLIDATED_KEY = KeyPattern(
    _consolidated, "consolidated/", _STEP, "-", _GENERATION, "-", _AFTER, ".json"
)
PART_KEY = KeyPattern(
    PartName, "parts/", _STEP, "-", _GENERATION, "-", _ATTEMPT, "/", _RANK, ".json"
)
#: Pages of manifests lie beside the chunks that they name.
PAGE_KEY = KeyPattern(
    PageName, "chunks/", _STEP, "-", _GENERATION, "-", _ATTEMPT, "/page-", _DIGEST, ".json"
)
PIN_KEY = KeyPattern(NamedCheckpoint, "pins/", _STEP, "-", _GENERATION, "-", _LABEL, ".json")
METRIC_KEY = KeyPattern(NamedCheckpoint, "metrics/", _STEP, "-", _GENERATION, "-", _LABEL, ".json")
VALIDATION_KEY = KeyPattern(
    ValidationName,
    *("validations/", _STEP, "-", _GENERATION, "-", _number("validation", 6, lowest=1)),
    *("-", _LEVEL, "-", _RESULT, ".json"),
)
PUBLICATION_KEY = KeyPattern(_number_of, "published/", _number("publication", 8, lowest=1), ".json")
REJECTIONS_KEY = KeyPattern(_number_of, "rejections/", _RANK, ".json")
LEASE_KEY = KeyPattern(_owner_of, "leases/", _OWNER, ".json")


def _marked(manifest: str) -> str:
    """Return `manifest` if it is the key of a manifest.

    Raises:
        ValueError: it is not.
    """
    if MANIFEST_KEY.parse(manifest) is None and CONSOLIDATED_KEY.parse(manifest) is None:
        raise ValueError(f"{manifest[:80]!r} is not the key of a manifest")
    return manifest


def _marked_in(text: str) -> str:
    # A step and a generation alone name a checkpoint's own manifest.
    kind = MANIFEST_KEY if text.count("-") == 1 else CONSOLIDATED_KEY
    return f"{kind.prefix}{text}.json"


#: Marks: the name in a mark's key is the key of its manifest.
EXPIRED_KEY = KeyPattern(
    _marked,
    "expired/",
    _KeyPart("[a-z0-9-]+", _marked_in, lambda key: key.partition("/")[2].removesuffix(".json")),
    ".json",
)


def is_label(name: str) -> bool:
    """Say whether `name` can be the name of a pin or a metric."""
    return re.fullmatch(_LABEL.looks, name) is not None


_ATTEMPT_PREFIX = re.compile(rf"chunks/({_STEP.looks})-({_GENERATION.looks})-({_HEX})/")
_CHUNK = re.compile(
    _ATTEMPT_PREFIX.pattern
    + r"r([0-9]{5})-(?:t([0-9]{5})|(state|sample))-([0-9]{6})\.safetensors\Z"
)
_PROBE = re.compile(rf"probe/{_HEX}\Z")
_JOB = re.compile(rf"({_GENERATION.looks})-({_STEP.looks})-r([0-9]{{5}})\Z")


def attempt_prefix(step: int, generation: int, attempt: str) -> str:
    """Return the prefix, ending in a slash, of all chunks of one attempt, and of its pages."""
    _within("step", step, 0, MAX_STEP)
    _within("generation", generation, 1, MAX_GENERATION)
    prefix = f"chunks/{step:012d}-{generation:08d}-{attempt}/"
    if not _ATTEMPT_PREFIX.fullmatch(prefix):
        raise ValueError(f"attempt {attempt!r} is not 32 lower-case hexadecimal digits")
    return prefix


def attempt_prefixes(
    step: int, generation: int, attempt: str, *, parts: int, ranks_each: int
) -> list[str]:
    """Return prefixes of the chunks of an attempt; each chunk has one of them, by its rank.

    Args:
        step, generation, attempt: the attempt.
        parts: the number of its parts: those of ranks, then those of embedding servers.
        ranks_each: how many numbers of parts a prefix covers: 1 or another power of ten.
    """
    prefix = attempt_prefix(step, generation, attempt)
    _within("rank", parts - 1, 0, MAX_RANK)
    digits = _RANK_DIGITS - len(str(ranks_each)) + 1
    last = "-" if ranks_each == 1 else ""
    return [
        f"{prefix}r{first // ranks_each:0{digits}d}{last}" for first in range(0, parts, ranks_each)
    ]


def rank_prefix(step: int, generation: int, attempt: str, *, rank: int) -> str:
    """Return the prefix of all chunks of one rank in an attempt."""
    _within("rank", rank, 0, MAX_RANK)
    return f"{attempt_prefix(step, generation, attempt)}r{rank:0{_RANK_DIGITS}d}-"


def shared_attempt(token: str, step: int, *, cut: int) -> str:
    """Return the attempt id of a checkpoint of several ranks.

    Each rank computes the same id without asking the others.

    Args:
        token: the token in the record of their generation.
        step: the step of the checkpoint.
        cut: how many checkpoints the ranks have cut together in this generation, this one
            included. So a second cut of the same step gets another attempt id.
    """
    identity = f"recpoint attempt|{token}|{_within('step', step, 0, MAX_STEP)}|{cut}"
    return hashlib.sha256(identity.encode("ascii")).hexdigest()[:32]


def row_chunk_key(
    step: int, generation: int, attempt: str, *, rank: int, table: int, number: int
) -> str:
    """Return the key of row chunk `number` of table `table`."""
    _within("rank", rank, 0, MAX_RANK)
    _within("table", table, 0, MAX_TABLE)
    _within("chunk number", number, 0, MAX_CHUNK)
    prefix = attempt_prefix(step, generation, attempt)
    return f"{prefix}r{rank:0{_RANK_DIGITS}d}-t{table:05d}-{number:06d}.safetensors"


def state_chunk_key(step: int, generation: int, attempt: str, *, rank: int, number: int) -> str:
    """Return the key of state chunk `number`."""
    return _tableless_key(step, generation, attempt, rank, number, "state")


def sample_chunk_key(step: int, generation: int, attempt: str, *, rank: int, number: int) -> str:
    """Return the key of sample chunk `number`."""
    return _tableless_key(step, generation, attempt, rank, number, "sample")


def _tableless_key(
    step: int, generation: int, attempt: str, rank: int, number: int, content: Content
) -> str:
    """Return the key of a chunk that belongs to no single table."""
    _within("rank", rank, 0, MAX_RANK)
    _within("chunk number", number, 0, MAX_CHUNK)
    prefix = attempt_prefix(step, generation, attempt)
    return f"{prefix}r{rank:0{_RANK_DIGITS}d}-{content}-{number:06d}.safetensors"


def is_probe_key(key: str) -> bool:
    """Say whether `key` is a probe: it tests create-only writes and is removed right after."""
    return _PROBE.match(key) is not None


def parse_chunk_key(key: str) -> AttemptName | None:
    """Return the attempt in a key of a chunk, or of a page of a manifest; None for other keys."""
    match = _CHUNK.match(key)
    if match is not None:
        return AttemptName(int(match[1]), int(match[2]), match[3])
    page = PAGE_KEY.parse(key)
    return None if page is None else page.written_by


def parse_chunk_name(key: str) -> ChunkName | None:
    """Return content, rank, table and number in a chunk's key; None if it is no chunk's key."""
    match = _CHUNK.match(key)
    if not match:
        return None
    content: Content = "rows"
    if match[6]:
        content = "state" if match[6] == "state" else "sample"
    return ChunkName(content, int(match[4]), int(match[5]) if match[5] else None, int(match[7]))


def job_stem(generation: int, step: int, rank: int) -> str:
    """Return the file name, without ending, of a job and its outcome in staging (format §7)."""
    _within("generation", generation, 1, MAX_GENERATION)
    _within("step", step, 0, MAX_STEP)
    _within("rank", rank, 0, MAX_RANK)
    return f"{generation:08d}-{step:012d}-r{rank:0{_RANK_DIGITS}d}"


def parse_job_stem(stem: str) -> tuple[int, int, int] | None:
    """Return (generation, step, rank) in a job's file stem; None if `stem` is no job's."""
    match = _JOB.match(stem)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


_Named = int | ManifestName | ConsolidatedName | PartName | NamedCheckpoint | ValidationName

#: By prefix, the kinds of keys that name a generation, except chunks and marks.
_OF_A_GENERATION: dict[str, KeyPattern[..., _Named]] = {
    GENERATION_KEY.prefix: GENERATION_KEY,
    END_KEY.prefix: END_KEY,
    PART_KEY.prefix: PART_KEY,
    MANIFEST_KEY.prefix: MANIFEST_KEY,
    CONSOLIDATED_KEY.prefix: CONSOLIDATED_KEY,
    PIN_KEY.prefix: PIN_KEY,
    METRIC_KEY.prefix: METRIC_KEY,
    VALIDATION_KEY.prefix: VALIDATION_KEY,
}

#: Prefixes of the keys that name a generation, except chunks, because a store has too many chunks.
FEW_OF_A_GENERATION = (*_OF_A_GENERATION, EXPIRED_KEY.prefix)


def generation_in_key(key: str) -> int | None:
    """Return the generation that a key of any kind names; None if it names none.

    A key that is not ours names none (format §2), even if its start looks like one of ours. So a
    copy of a manifest with `.bak` at its end takes no generation number from any trainer.
    """
    if (chunk := parse_chunk_key(key)) is not None:
        return chunk.generation
    described_key = EXPIRED_KEY.parse(key) or key
    pattern = _OF_A_GENERATION.get(described_key[: described_key.find("/") + 1])
    name = None if pattern is None else pattern.parse(described_key)
    return name if name is None or isinstance(name, int) else name.generation
