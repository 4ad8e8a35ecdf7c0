"""Packs records into JSON envelopes with a digest, and checks them on reading (format §4, §7)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import crc32c
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from recpoint.errors import DigestMismatch, MalformedObject, UnsupportedVersion
from recpoint.format.naming import MAX_GENERATION, MAX_STEP
from recpoint.format.untrusted_json import brief, parse_json
from recpoint.format.version import FORMAT_VERSION

__all__ = [
    "MAX_RECORD_BYTES",
    "CheckpointRef",
    "EndRecord",
    "GenerationRecord",
    "HexFloat",
    "HexToken",
    "Record",
    "RunRecord",
    "StoredRecord",
    "body_bytes",
    "check_version",
    "first_defect",
    "pack_record",
    "unpack_record",
    "validate",
]

MAX_RECORD_BYTES = 64 << 20


def _finite(text: str) -> str:
    try:
        value = float.fromhex(text)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or value.hex() != text:
        raise ValueError("must be the float.hex() of a finite number")
    return text


#: A finite number, as records have them: the text of its `float.hex()`.
HexFloat = Annotated[str, Field(max_length=40), AfterValidator(_finite)]
HexToken = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{32}\z")]
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Generation = Annotated[int, Field(ge=1, le=MAX_GENERATION)]
Milliseconds = Annotated[int, Field(ge=0, lt=2**53)]


class Part(BaseModel):
    """A piece of a record: immutable; refuses unknown fields and converts no values."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Record(Part):
    """A whole record; each subclass fixes `format` to its own name, and may fix `version`."""

    format: str
    version: Literal[1, 2] = FORMAT_VERSION


class StoredRecord(Record):
    """A record that lies in a run; `run` is that run's id."""

    run: HexToken


PartT = TypeVar("PartT", bound=Part)
RecordT = TypeVar("RecordT", bound=Record)


class CheckpointRef(Part):
    """Names one checkpoint for ever.

    Step and generation make up its key; the attempt tells it from other attempts at that key.
    """

    step: Step
    generation: Generation
    attempt: HexToken

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation}, attempt {self.attempt[:8]})"


class RunRecord(StoredRecord):
    """`run.json`: makes a directory or bucket prefix a run."""

    format: Literal["recpoint/run"] = "recpoint/run"
    created_ms: Milliseconds


class GenerationRecord(StoredRecord):
    """One start of a trainer on a run, and the checkpoint that it restored (format §5)."""

    format: Literal["recpoint/generation"] = "recpoint/generation"
    generation: Generation
    token: HexToken
    restored: CheckpointRef | None
    host: Annotated[str, Field(max_length=255)]
    pid: Annotated[int, Field(ge=0, lt=2**32)]
    created_ms: Milliseconds


class EndRecord(StoredRecord):
    """Says how a trainer ended, or that it is superseded, and after how many batches (format §5).

    If a checkpoint of `step` exists, this end loses nothing.
    """

    format: Literal["recpoint/end"] = "recpoint/end"
    generation: Generation
    step: Step
    reason: Annotated[
        str,
        Field(max_length=1024, pattern=r"^(?s:finished|terminated|superseded|failed: .+)$"),
    ]
    ended_ms: Milliseconds


def pack_record(record: Record) -> bytes:
    """Return the envelope of `record`: canonical body and its crc32c, as UTF-8 JSON.

    Raises:
        ValueError: the record is larger than a reader accepts.
    """
    body = _canonical(record.model_dump(mode="json"))
    if len(body) + 64 > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(body)} bytes; at most {MAX_RECORD_BYTES} are read")
    return b'{"body":%b,"crc32c":%d}\n' % (body, crc32c.crc32c(body))


def body_bytes(part: Part) -> int:
    """Return the bytes that `part` takes in a record."""
    return len(_canonical(part.model_dump(mode="json")))


def unpack_record(
    kind: type[RecordT],
    data: bytes,
    *,
    name: str,
    next_step: str,
    later: type[RecordT] | None = None,
) -> RecordT:
    """Check an envelope and return its record.

    Args:
        kind: the record expected.
        data: the object's bytes, in full.
        name: key or path, for errors.
        next_step: what a person should do about a damaged record, for errors.
        later: the same record in its next version; None: there is only one.

    Raises:
        MalformedObject: the data is not JSON as format §4 asks.
        DigestMismatch: the record is well-formed, but its body has another crc32c than recorded.
        UnsupportedVersion: this release does not read the record's version.
    """

    def malformed(found: str, expected: str) -> MalformedObject:
        return MalformedObject(name, found=found, expected=expected, next_step=next_step)

    envelope = parse_json(data, name=name, next_step=next_step, max_bytes=MAX_RECORD_BYTES)
    if not isinstance(envelope, dict) or envelope.keys() != {"body", "crc32c"}:
        raise malformed("no envelope", "an object with exactly the fields body and crc32c")
    body = envelope["body"]
    expected_format = kind.model_fields["format"].default
    if not isinstance(body, dict) or body.get("format") != expected_format:
        body_format = body.get("format") if isinstance(body, dict) else body
        raise malformed(f"format {brief(body_format)}", f"format {expected_format!r}")
    kinds = (kind,) if later is None else (kind, later)
    versions = [one.model_fields["version"].default for one in kinds]
    version = check_version(body, versions, name=name, next_step=next_step)
    digest = crc32c.crc32c(_canonical(body))
    recorded = envelope["crc32c"]
    if type(recorded) is not int:  # True == 1
        raise malformed(f"crc32c {brief(recorded)}", "an integer")
    if recorded != digest:
        raise DigestMismatch(
            name,
            found=f"a body with crc32c {digest}",
            expected=f"crc32c {brief(recorded)}",
            next_step=next_step,
        )
    chosen = kinds[versions.index(version)]
    return validate(chosen, body, name=name, next_step=next_step)


def check_version(
    fields: dict[str, Any], versions: Sequence[int], *, name: str, next_step: str
) -> int:
    """Return `version`, and refuse any but `versions` before any other field is checked.

    Raises:
        UnsupportedVersion: `version` is another integer.
        MalformedObject: `version` is missing or not an integer.
    """
    version = fields.get("version")
    expected = f"version {' or '.join(map(str, versions))}"
    if type(version) is not int:  # True == 1
        raise MalformedObject(
            name,
            found=f"version {brief(version)}",
            expected=expected,
            next_step=next_step,
        )
    if version not in versions:
        raise UnsupportedVersion(
            name,
            found=f"version {brief(version)}",
            expected=expected,
            next_step="pip install --upgrade recpoint",
        )
    return version


def validate(
    kind: type[PartT],
    fields: dict[str, Any],
    *,
    name: str,
    next_step: str,
    exclude_none: bool = False,
) -> PartT:
    """Return `fields` as a `kind`: nothing missing, unknown, converted or out of bounds.

    Raises:
        MalformedObject: a field is not so; the message is short whatever the fields hold.
    """
    try:
        part = kind.model_validate(fields)
    except ValidationError as error:
        fault, expected = first_defect(error)
        raise MalformedObject(name, found=fault, expected=expected, next_step=next_step) from None
    # Validation alone fills missing fields with defaults and accepts true as a literal 1.
    if _canonical(part.model_dump(mode="json", exclude_none=exclude_none)) != _canonical(fields):
        raise MalformedObject(
            name,
            found=f"a {kind.__name__} with fields missing or of another type",
            expected="each field as format §3 and §4 give it",
            next_step=next_step,
        )
    return part


def first_defect(error: ValidationError) -> tuple[str, str]:
    """Return (found, expected) of the first defect, both short whatever the input was."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(piece)[:80] for piece in first["loc"]) or "the record"
    return f"{field} = {brief(first['input'])}", first["msg"][:200]


def _canonical(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()
