"""Coverage-guided fuzzing of the parsers, by hand and not in CI (tests/hostile has the fast part).

    make fuzz      (installs atheris: CPython 3.11 on Linux; not a dependency, it has few wheels)
    python tests/fuzz/fuzz_parsers.py records -runs=1000000 -max_len=8192 -rss_limit_mb=6000

atheris itself leaks about 2 KB an execution, hence -rss_limit_mb; the parsers do not. Runs are
recorded in tests/fuzz/RUNS.md.

The golden files are the seeds. Whatever the bytes are, only a FormatError may come out; what is
accepted must be written and read again as the same. Digests and lengths are put right first where
they would end most inputs before the parser begins.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris
import crc32c

ROOT = Path(__file__).parents[2]


with atheris.instrument_imports(include=["recpoint"]):
    import torch

    from recpoint.errors import FormatError
    from recpoint.format.chunk import parse_chunk, section_tensor
    from recpoint.format.job import Cancel, Job, Outcome
    from recpoint.format.manifest import Manifest
    from recpoint.format.part import RankPart
    from recpoint.format.records import (
        EndRecord,
        GenerationRecord,
        Record,
        RunRecord,
        StoredRecord,
        pack_record,
        unpack_record,
    )
    from recpoint.format.rejections import Rejections
    from recpoint.format.retention_records import (
        Deletion,
        Lease,
        Mark,
        Metric,
        Pin,
        Plan,
        Publication,
    )
    from recpoint.format.servers import ServersRecord
    from recpoint.format.state_tree import flatten, unflatten
    from recpoint.format.validation import ValidationRecord
    from recpoint.kernels import row_set as kernel
    from recpoint.kernels.row_set import reference
    from recpoint.kernels.row_set.frame import compress

GOLDEN = ROOT / "tests" / "golden" / "v1"
#: Every record that there is, and its golden files.
SEEDS: dict[type[Record], str] = {
    RunRecord: "run.json",
    GenerationRecord: "generations/*.json",
    EndRecord: "ends/*.json",
    Manifest: "manifests/*.json consolidated/*.json",
    RankPart: "parts/*/*.json",
    Job: "staging/job.json",
    Outcome: "staging/outcome.json",
    Cancel: "staging/cancel.json",
    ServersRecord: "staging/servers.json",
    Pin: "pins/*.json",
    Metric: "metrics/*.json",
    Mark: "expired/*.json",
    Deletion: "deletion.json",
    Lease: "leases/*.json",
    Publication: "published/*.json",
    Plan: "retention.json",
    Rejections: "rejections/*.json",
    ValidationRecord: "validations/*.json",
}
KINDS = list(SEEDS)
assert set(KINDS) == {*Record.__subclasses__(), *StoredRecord.__subclasses__()} - {StoredRecord}
SPLIT = b"\x00|\x00|"


def records(data: bytes) -> None:
    """First byte: which record, and whether to put the envelope's digest right."""
    if not data:
        return
    kind, text = KINDS[data[0] % len(KINDS)], data[1:]
    if data[0] >= 128:
        try:
            body = json.dumps(
                json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False
            ).encode()
        except (ValueError, RecursionError):
            return
        text = b'{"body":%b,"crc32c":%d}' % (body, crc32c.crc32c(body))
    try:
        record = unpack_record(kind, text, name="fuzz", next_step="")
    except FormatError as error:
        assert len(str(error)) < 2000
        return
    assert unpack_record(kind, pack_record(record), name="fuzz", next_step="") == record


def record_seeds() -> list[bytes]:
    seeds = []
    for number, (kind, patterns) in enumerate(SEEDS.items()):
        paths = [path for pattern in patterns.split() for path in sorted(GOLDEN.glob(pattern))]
        assert paths, patterns
        for path in paths:
            data = path.read_bytes()
            unpack_record(kind, data, name=str(path), next_step="")
            body = json.dumps(json.loads(data)["body"]).encode()
            seeds.append(bytes([number]) + data)
            seeds.append(bytes([_repairing(number, len(KINDS))]) + body)
    return seeds


def _repairing(choice: int, choices: int) -> int:
    """The first byte from 128 on that stands for `choice`."""
    return next(byte for byte in range(128, 256) if byte % choices == choice)


_MANIFESTS = [
    unpack_record(Manifest, path.read_bytes(), name="", next_step="")
    for folder in ("manifests", "consolidated")
    for path in sorted((GOLDEN / folder).iterdir())
]
_ENTRIES = [(manifest, entry) for manifest in _MANIFESTS for entry in manifest.chunks]


def chunk(data: bytes) -> None:
    """First byte: which manifest's entry, and whether to put the header's length right."""
    if not data:
        return
    manifest, entry = _ENTRIES[data[0] % len(_ENTRIES)]
    blob = data[1:]
    if data[0] >= 128:
        header, _, body = blob.partition(SPLIT)
        blob = len(header).to_bytes(8, "little") + header + body
    entry = entry.model_copy(update={"bytes": len(blob), "crc32c": crc32c.crc32c(blob)})
    try:
        meta, sections = parse_chunk(blob, key=entry.key, entry=entry, manifest=manifest)
    except FormatError as error:
        assert len(str(error)) < 2000
        return
    assert meta.run == manifest.run
    assert (
        b"".join(bytes(section.data_view) for section in sections.values())
        == blob[len(blob) - sum(section.nbytes for section in sections.values()) :]
    )
    for section in sections.values():
        assert tuple(section_tensor(section).shape) == section.shape


def chunk_seeds() -> list[bytes]:
    seeds = []
    for index, (_, entry) in enumerate(_ENTRIES):
        blob = (GOLDEN / entry.key).read_bytes()
        length = int.from_bytes(blob[:8], "little")
        seeds.append(bytes([index]) + blob)
        first = _repairing(index, len(_ENTRIES))
        seeds.append(bytes([first]) + blob[8 : 8 + length] + SPLIT + blob[8 + length :])
    return seeds


_TENSORS = [
    torch.tensor([0, 2]),
    torch.tensor([1.0, 2.0]),
    torch.tensor([[0, 1], [1, 0]]),
    torch.tensor([[1, -1]], dtype=torch.int32),
    torch.zeros(4, dtype=torch.uint8),
    torch.tensor([True, False]),
    torch.empty(0, dtype=torch.bfloat16),
]


def tree(data: bytes) -> None:
    """First byte: how many tensors there are."""
    if not data:
        return
    try:
        value = unflatten(data[1:], _TENSORS[: data[0] % (len(_TENSORS) + 1)])
    except FormatError as error:
        assert len(str(error)) < 2000
        return
    text, tensors = flatten(value)
    again, more = flatten(unflatten(text, tensors))
    assert again == text
    assert all(
        one.dtype == other.dtype and one.reshape(-1).equal(other.reshape(-1))
        for one, other in zip(tensors, more, strict=True)
    )


def tree_seeds() -> list[bytes]:
    sparse = torch.sparse_coo_tensor(
        _TENSORS[2], _TENSORS[1], (4, 3), check_invariants=True, is_coalesced=True
    )
    values: list[object] = [
        None,
        [1, 2.5, -(2**70), "ü", True, (1, (2,)), float("nan")],
        {"a": {1: {False: [{}]}}},
        [_TENSORS[0], {"x": _TENSORS[1].numpy()}],
        [_TENSORS[0], _TENSORS[1], sparse],
        list(_TENSORS),
    ]
    seeds = [bytes([len(flatten(value)[1])]) + flatten(value)[0] for value in values]
    named = (
        b'[{"tensor":0,"shape":[2],"dtype":"I64"},'
        b'{"sparse_coo":{"indices":{"tensor":2,"shape":[2,2],"dtype":"I64"},'
        b'"values":{"tensor":1,"shape":[2],"dtype":"F32"},"shape":[4,3],"coalesced":true}},'
        b'{"ndarray":3,"shape":[2],"dtype":"U32"},{"bytes":4},{"scalar":"00","dtype":"BOOL"}]'
    )
    return [*seeds, bytes([5]) + b'{"list":' + named + b"}"]


_ROW_SETS = ("range", "bitmap", "runs", "delta")
_HEADER_BYTES = {"bitmap": 0, "runs": 10, "delta": 1}


def row_set(data: bytes) -> None:
    """Bytes 0 to 2: which coding, and whether to compress the rest first; the count; the table."""
    if len(data) < 3:
        return
    coding, count, rows = _ROW_SETS[data[0] % 4], data[1], data[1] << data[2] % 32
    payload: bytes | None = data[3:]
    if coding == "range":
        payload = None
    elif data[0] >= 128:
        header = _HEADER_BYTES[coding]
        content = torch.tensor(list(data[3 + header :]), dtype=torch.uint8)
        payload = data[3 : 3 + header] + compress([content.numpy()])
    found = []
    for decode in (kernel.decode, reference.decode):
        try:
            ids = decode(coding, data[2] >> 5, payload, count=count, rows=rows)
        except ValueError as error:
            found.append(str(error))
            continue
        assert ids.numel() == count and bool((ids.diff() > 0).all())
        assert count == 0 or (int(ids[0]) >= 0 and int(ids[-1]) < rows)
        found.append(str(ids.tolist()))
    assert found[0] == found[1]


def row_set_seeds() -> list[bytes]:
    sets = [list(range(9)), [0, 1, 3, 9], [0, 2, 3, 299, 304], [0, 1, 2, 94, 95], [0, 7, 2**24]]
    seeds = []
    for ids in sets:
        coding, _, payload = kernel.encode(torch.tensor(ids))
        which = _ROW_SETS.index(coding)
        seeds.append(bytes([which, len(ids), 24]) + (payload or b""))
    seeds.append(bytes([_repairing(1, 4), 4, 4, 0b1011, 0b10]))
    seeds.append(bytes([_repairing(3, 4), 5, 8, 0, 1, 0, 255, 40, 4]))
    seeds.append(bytes([_repairing(2, 4), 5, 8, 2, *bytes(9), 90, 2]))
    return seeds


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "records": (records, record_seeds),
    "chunk": (chunk, chunk_seeds),
    "tree": (tree, tree_seeds),
    "row_set": (row_set, row_set_seeds),
}


def main() -> None:
    target, seeds = TARGETS[sys.argv[1]]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            target(seed)
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[2:], corpus], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
