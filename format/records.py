"""JSON records with a digest: the envelope that every record of format §4 and §7 travels in."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

import crc32c
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from recpoint.errors import DigestMismatch, MalformedObject, UnsupportedVersion
from recpoint.format.naming import MAX_GENERATION, MAX_STEP
from recpoint.format.version import FORMAT_VERSION

__all__ = [
    "MAX_RECORD_BYTES",
    "CheckpointRef",
    "GenerationRecord",
    "HexToken",
    "Record",
    "RunRecord",
    "pack_record",
    "parse_json",
    "unpack_record",
]

MAX_RECORD_BYTES = 64 << 20
MAX_RECORD_DEPTH = 16

HexToken = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{32}\z")]
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Generation = Annotated[int, Field(ge=1, le=MAX_GENERATION)]
Milliseconds = Annotated[int, Field(ge=0, lt=2**53)]


class Part(BaseModel):
    """A piece of a record: immutable, nothing converted, nothing unknown let through."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Record(Part):
    """A whole record; subclasses fix `format` to their own name."""

    format: str
    version: Literal[1] = FORMAT_VERSION


RecordT = TypeVar("RecordT", bound=Record)


class CheckpointRef(Part):
    """Names one checkpoint for good: step and generation say where, the attempt says which."""

    step: Step
    generation: Generation
    attempt: HexToken

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation}, attempt {self.attempt[:8]})"


class RunRecord(Record):
    """`run.json`: makes a directory or bucket prefix a run."""

    format: Literal["recpoint/run"] = "recpoint/run"
    run: HexToken
    created_ms: Milliseconds


class GenerationRecord(Record):
    """One start of a trainer on a run, and the checkpoint it goes on from (format §5)."""

    format: Literal["recpoint/generation"] = "recpoint/generation"
    run: HexToken
    generation: Generation
    token: HexToken
    restored: CheckpointRef | None
    host: Annotated[str, Field(max_length=255)]
    pid: Annotated[int, Field(ge=0, lt=2**32)]
    created_ms: Milliseconds


def pack_record(record: Record) -> bytes:
    """The envelope of `record`: canonical body and its crc32c, as UTF-8 JSON."""
    body = _canonical(record.model_dump(mode="json"))
    return b'{"body":%b,"crc32c":%d}\n' % (body, crc32c.crc32c(body))


def unpack_record(kind: type[RecordT], data: bytes, *, name: str, next_step: str) -> RecordT:
    """Check an envelope and return its record.

    Args:
        kind: the record expected.
        data: the object's bytes, in full.
        name: key or path, for errors.
        next_step: what a person should do about a broken one, for errors.

    Raises:
        MalformedObject: not the JSON that format §4 asks for.
        DigestMismatch: well-formed, but not the bytes that were written.
        UnsupportedVersion: a version this release does not read.
    """

    def malformed(found: str, expected: str) -> MalformedObject:
        return MalformedObject(name, found=found, expected=expected, next_step=next_step)

    envelope = parse_json(data, name=name, next_step=next_step)
    if not isinstance(envelope, dict) or envelope.keys() != {"body", "crc32c"}:
        raise malformed("no envelope", "an object with exactly the fields body and crc32c")
    body = envelope["body"]
    expected_format = kind.model_fields["format"].default
    if not isinstance(body, dict) or body.get("format") != expected_format:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise malformed(f"format {found!r:.80}", f"format {expected_format!r}")
    version = body.get("version")
    if version != FORMAT_VERSION and isinstance(version, int):
        raise UnsupportedVersion(
            name,
            found=f"version {version}",
            expected=f"version {FORMAT_VERSION}",
            next_step="pip install --upgrade recpoint",
        )
    digest = crc32c.crc32c(_canonical(body))
    if envelope["crc32c"] != digest:
        raise DigestMismatch(
            name,
            found=f"a body with crc32c {digest}",
            expected=f"crc32c {envelope['crc32c']!r:.80}",
            next_step=next_step,
        )
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the record"
        raise malformed(f"{where} = {first['input']!r:.80}", first["msg"]) from error


def parse_json(
    data: bytes,
    *,
    name: str,
    next_step: str,
    max_bytes: int = MAX_RECORD_BYTES,
    max_depth: int = MAX_RECORD_DEPTH,
) -> Any:
    """Parse JSON from an untrusted store: bounded size and depth, no duplicate keys, no floats.

    Raises:
        MalformedObject: whatever is wrong with it.
    """

    def malformed(found: str, expected: str) -> MalformedObject:
        return MalformedObject(name, found=found, expected=expected, next_step=next_step)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise malformed(f"the key {twice!r:.80} twice in one object", "each key once")
        return record

    def no_float(text: str) -> Any:
        raise malformed(f"the number {text:.40}", "integers only")

    if len(data) > max_bytes:
        raise malformed(f"{len(data)} bytes", f"at most {max_bytes}")
    _check_depth(data, max_depth, malformed)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=no_float,
            parse_constant=no_float,
        )
    except ValueError as error:
        raise malformed(f"no JSON ({error})", "UTF-8 JSON") from error


def _check_depth(data: bytes, max_depth: int, malformed: Any) -> None:
    """Refuse deep nesting before the parser, which recurses, ever sees it."""
    depth, in_string, escaped = 0, False, False
    for byte in data:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            if depth > max_depth:
                raise malformed(f"nesting deeper than {max_depth}", f"at most {max_depth} levels")
        elif byte in b"]}":
            depth -= 1


def _canonical(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # surrogatepass: "\ud800" is legal JSON text; it must fail in validation, not while hashing.
    return text.encode("utf-8", errors="surrogatepass")
