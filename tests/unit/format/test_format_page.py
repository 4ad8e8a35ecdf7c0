"""The samples, the directory tree and the numbered rules of docs/format.md are true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from recpoint.format.job import Cancel, Job, Outcome
from recpoint.format.manifest import Manifest
from recpoint.format.manifest_root import ManifestRoot, Page
from recpoint.format.naming import parse_chunk_key, parse_job_stem
from recpoint.format.paging import page_digest
from recpoint.format.record_kinds import (
    CONSOLIDATED,
    GENERATION,
    MANIFEST,
    RUN,
    SIDE_KINDS,
    AnyKind,
    kind_of,
)
from recpoint.format.record_kinds import (
    PAGE as PAGE_KIND,
)
from recpoint.format.records import Record, pack_record, unpack_record
from recpoint.format.servers import ServersRecord
from recpoint.kernels.implementation import on_cpu
from recpoint.kernels.native import INSTRUCTION_SETS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "format.md").read_text()
STAGED: dict[str, type[Record]] = {
    "jobs": Job,
    "outcomes": Outcome,
    "cancels": Cancel,
    "servers.json": ServersRecord,
}

_TREES = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAMPLES = re.compile(r"^\*\*([^*]+)\*\*, `([^`]+)`[^\n]*\n\n```json\n(.*?)^```$", re.M | re.DOTALL)
_ORDERS = "(?P<order>write|joining|read|delete|consolidation|staging) order"
_RULES = r"rules? (?P<rules>\d+(?:(?:, | and | to )\d+)*)"
#: Both ways in which code and pages cite a rule; a line may end anywhere in them.
_CITED = (
    re.compile(rf"{_ORDERS},? \(?{_RULES}"),
    re.compile(rf"{_RULES} of the {_ORDERS}", re.IGNORECASE),
)


class Sample(NamedTuple):
    """One record as the page shows it."""

    title: str
    path: str
    data: bytes


def _samples() -> list[Sample]:
    return [Sample(title, path, text.encode()) for title, path, text in _SAMPLES.findall(PAGE)]


def _tree(text: str) -> set[str]:
    """The paths of all files of a tree that is drawn by indentation, two spaces a level."""
    folders: list[str] = []
    files: set[str] = set()
    for line in text.splitlines():
        name = line.split("  #")[0].rstrip()
        depth = (len(name) - len(name.lstrip())) // 2
        del folders[depth:]
        name = name.strip()
        if name.endswith("/"):
            folders.append(name)
        else:
            files.add("".join([*folders[1:], name]))
    return files


SAMPLES = _samples()
IN_THE_RUN, STAGED_FILES = (_tree(text) for text in _TREES.findall(PAGE))
RUN_ID = json.loads(next(one.data for one in SAMPLES if one.path == RUN.keys.prefix))["body"]["run"]


def _record(sample: Sample) -> Record:
    folder = sample.path.partition("/")[0]
    if folder in STAGED:
        return unpack_record(STAGED[folder], sample.data, name=sample.path, next_step="")
    kind = kind_of(sample.path)
    assert kind is not None, sample.path
    record: Record = kind.unpack(sample.data, sample.path, run=RUN_ID, url="")
    return record


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.title)
def test_a_sample_is_a_record_of_its_key(sample: Sample) -> None:
    record = _record(sample)
    assert json.loads(pack_record(record)) == json.loads(sample.data)


def test_samples_name_the_quantizer_as_it_is_written_today() -> None:
    manifests = [json.loads(sample.data)["body"] for sample in SAMPLES]
    named = {body["quantized_by"] for body in manifests if body.get("quantized_by")}
    assert named
    today = on_cpu().rpartition(", ")[0]  # behind it the instruction set of this machine
    for name in named:
        words, _, instructions = name.rpartition(", ")
        assert re.sub(r"\d+ threads?", "n threads", words) == re.sub(
            r"\d+ threads?", "n threads", today
        )
        assert instructions in INSTRUCTION_SETS


def test_each_kind_has_a_sample() -> None:
    shown = {sample.path.partition("/")[0] for sample in SAMPLES}
    kinds: tuple[AnyKind, ...] = (RUN, GENERATION, MANIFEST, CONSOLIDATED, PAGE_KIND, *SIDE_KINDS)
    assert shown == {kind.keys.prefix.rstrip("/") for kind in kinds} | STAGED.keys()


def test_the_tree_is_that_of_a_run() -> None:
    for key in IN_THE_RUN:
        assert kind_of(key) or parse_chunk_key(key), key
    shown = {sample.path for sample in SAMPLES}
    assert {path for path in shown if path.partition("/")[0] not in STAGED} <= IN_THE_RUN
    assert {path for path in shown if path.partition("/")[0] in STAGED} <= STAGED_FILES
    for path in STAGED_FILES:
        folder, _, name = path.partition("/")
        is_job = name and folder in STAGED
        assert not is_job or parse_job_stem(name.removesuffix(".json")), path


def test_the_tree_has_what_the_manifests_name() -> None:
    manifests = [record for record in map(_record, SAMPLES) if isinstance(record, Manifest)]
    assert len(manifests) > 1
    assert {chunk.key for one in manifests for chunk in one.chunks} <= IN_THE_RUN


def test_the_tree_has_what_the_root_and_its_page_name() -> None:
    records = [_record(sample) for sample in SAMPLES]
    (root,) = [record for record in records if isinstance(record, ManifestRoot)]
    (page,) = [record for record in records if isinstance(record, Page)]
    assert {root.page_key(entry) for entry in root.pages} <= IN_THE_RUN
    assert {chunk.key for chunk in page.chunks} <= IN_THE_RUN
    data = pack_record(page)  # as it is stored, which the key and the root tell
    shown = next(sample.path for sample in SAMPLES if sample.title == "Page")
    (entry,) = [entry for entry in root.pages if root.page_key(entry) == shown]
    assert page.entry(page=page_digest(data), bytes_=len(data)) == entry


def _rules() -> dict[str, int]:
    """How many rules each order has, by its name."""
    counts: dict[str, int] = {}
    name = ""
    for line in PAGE.splitlines():
        if heading := re.match(r"(?:### [\d.]+ |\*\*)(\w+) order\b", line):
            name = heading[1].lower()
        elif "**joining order**:" in line:
            name = "joining"
        elif line.startswith("#"):
            name = ""
        elif name and (rule := re.match(r"(\d+)\. \*\*", line)):
            counts[name] = counts.get(name, 0) + 1
            assert int(rule[1]) == counts[name], line
    return counts


def test_cited_rules_are_on_the_page() -> None:
    rules = _rules()
    assert rules.keys() == {"write", "joining", "read", "delete", "consolidation", "staging"}
    count = 0
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    for path in (file for folder in folders for file in folder.rglob("*.[pm][yd]")):
        text = re.sub(r"\n[ #:]*", " ", path.read_text())
        for found in (match for cited in _CITED for match in cited.finditer(text)):
            where = f"{path.relative_to(ROOT)}: {found[0]}"
            numbers = [int(number) for number in re.findall(r"\d+", found["rules"])]
            assert 1 <= min(numbers) <= max(numbers) <= rules[found["order"]], where
            count += 1
    assert count > 50
