"""Restoring into files of safetensors with an index: what is in them, and what is never mixed."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file
from typer.testing import CliRunner

from recpoint.catalog.restore import shard_plan
from recpoint.catalog.restore.files import restore_shards, write_shard
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.shard_place import finish_shards, take_back
from recpoint.catalog.restore.shard_plan import (
    INDEX,
    MAX_HEADER_BYTES,
    ShardFile,
    ShardTensor,
    plan_shards,
)
from recpoint.catalog.restore.state_tensors import Include
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import Store, open_store
from recpoint.cli import app
from recpoint.errors import RecpointError, RestoreError, SettingsError, StoreUnavailable
from recpoint.format.manifest import Manifest
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.interposed_store import InterposedStore, unavailable
from tests.torch_interpreter import run_program

STATE = {
    "model": {"tensors": {"top.bias": torch.arange(3.0), "steps": torch.tensor(7)}, "extra": {}},
    "rng": {"torch": torch.arange(5, dtype=torch.uint8)},
}


def trained() -> list[Table]:
    """Two whole tables and one in pieces of columns, of all widths of items."""
    generator = torch.Generator().manual_seed(5)
    wide = Table(
        "wide",
        torch.randn(30, 6, generator=generator, dtype=torch.float64),
        (torch.rand(30, 6, generator=generator), torch.arange(30)),
        bits=None,
    )
    halves = Table("halves", torch.randn(7, 5, generator=generator).to(torch.bfloat16))
    return [*tables(bits=4), *wide.cut([4]), halves]


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Run, list[Manifest]]:
    """A full and two increments."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    generator = torch.Generator().manual_seed(1)
    made: list[Manifest] = []
    all_tables = trained()
    for step in (1, 2, 3):
        dirty = [torch.arange(step, table.rows, 3) for table in all_tables]
        if step > 1:
            for table, ids in zip(all_tables, dirty, strict=True):
                floating = [t for t in (table.values, *table.states) if t.is_floating_point()]
                for tensor in floating:
                    shape = (ids.numel(), *tensor.shape[1:])
                    tensor[ids] = torch.randn(shape, generator=generator).to(tensor.dtype)
        checkpoint = build(
            run, all_tables, step=step, generation=1, parent=made[-1] if made else None,
            dirty=dirty if made else None, state=STATE,
        )  # fmt: skip
        made.append(publish(run, checkpoint))
    return run, made


def in_one_file(run: Run, path: Path, *arguments: str) -> dict[str, torch.Tensor]:
    """What `recpoint restore` writes into one file."""
    ended = CliRunner().invoke(app, ["restore", run.url, "--to", str(path), *arguments])
    assert ended.exit_code == 0, ended.output
    return load_file(path)


def by_index(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, found as programs find them: by the index."""
    index = json.loads((directory / INDEX).read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(directory / file, framework="pt") as shard:
            assert shard.metadata()["format"] == "pt"
            found[name] = shard.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    files = {path.name for path in directory.iterdir()} - {INDEX}
    assert files == set(index["weight_map"].values())
    return found


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def left(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Which files are there, and what tells whether one was written once more."""
    there = {path.name: path.stat() for path in directory.iterdir()}
    return {name: (s.st_ino, s.st_mtime_ns, s.st_size) for name, s in there.items()}


@pytest.mark.parametrize("include", ["model", "all"])
@pytest.mark.parametrize(("shard_bytes", "files"), [(1, 5), (1500, 3), (1 << 30, 1)])
def test_the_same_tensors_as_in_one_file(
    chain: tuple[Run, list[Manifest]],
    tmp_path: Path,
    shard_bytes: int,
    files: int,
    include: Include,
) -> None:
    run, _ = chain
    into = tmp_path / "out"
    report = restore_shards(run, open_store(str(into)), include=include, shard_bytes=shard_bytes)
    assert report.restored.step == 3 and report.chain_length == 3
    one = in_one_file(run, tmp_path / "one.safetensors", "--include", include)
    require_same(by_index(into), one)
    names = {f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)}
    assert {path.name for path in into.iterdir()} == {INDEX, *names}


def test_several_ranks_make_whole_tensors(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    publish(run, build(run, trained(), step=1, generation=1, state=STATE, ranks=3))
    restore_shards(run, open_store(str(tmp_path / "out")), shard_bytes=1)
    require_same(by_index(tmp_path / "out"), in_one_file(run, tmp_path / "one.safetensors"))


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL that is no local directory."""
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3_run_url')}/exports"
    else:
        yield f"memory://shards-{id(request)}/exports"


def test_into_a_store_that_is_no_directory(
    chain: tuple[Run, list[Manifest]], tmp_path: Path, remote: str
) -> None:
    run, _ = chain
    into = open_store(remote)
    restore_shards(run, into, shard_bytes=1)
    (fetched := tmp_path / "fetched").mkdir()
    for info in into.list():
        (fetched / info.key).write_bytes(into.get(info.key, max_bytes=1 << 20))
    require_same(by_index(fetched), in_one_file(run, tmp_path / "one.safetensors"))
    assert restore_shards(run, into, shard_bytes=1).restored.step == 3  # it is there
    with pytest.raises(SettingsError, match=INDEX):
        restore_shards(run, into, Selection(step=2), shard_bytes=1)


def test_nobody_else_can_read_what_is_made_here_for_a_store_elsewhere(
    chain: tuple[Run, list[Manifest]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    modes: list[int] = []

    def before(call: str, key: str) -> None:
        modes.extend(path.stat().st_mode & 0o777 for path in scratch.iterdir())

    into = InterposedStore(open_store(f"memory://private-{id(modes)}/out"), before=before)
    restore_shards(chain[0], into, shard_bytes=1)
    assert set(modes) == {0o600}
    before_umask = os.umask(0o022)
    try:
        restore_shards(chain[0], open_store(str(tmp_path / "out")), shard_bytes=1)
    finally:
        os.umask(before_umask)
    made = list((tmp_path / "out").iterdir())
    assert made and {path.stat().st_mode & 0o777 for path in made} == {0o644}


def test_damage_falls_back_and_leaves_nothing_of_it(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, made = chain
    last = [entry for entry in made[2].chunks if entry.content == "rows"][-1]
    run.store.put(last.key, bytes(last.bytes))
    into = tmp_path / "out"
    report = restore_shards(run, open_store(str(into)), shard_bytes=1)
    assert report.restored.step == 2
    ((name, error),) = report.skipped
    assert name.step == 3 and "DigestMismatch" in error
    require_same(by_index(into), in_one_file(run, tmp_path / "one.safetensors", "--step", "2"))
    with pytest.raises(Exception, match=last.key):
        restore_shards(run, open_store(str(tmp_path / "other")), Selection(step=3), shard_bytes=1)
    assert not (tmp_path / "other" / INDEX).exists()


def test_what_was_begun_is_finished_and_nothing_is_mixed(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, _ = chain
    into = open_store(str(tmp_path / "out"))
    plan = plan_shards(run, shard_bytes=1)
    assert write_shard(run, into, plan, plan.shards[1]) is not None
    written = left(tmp_path / "out")[plan.shards[1].file]
    leftover = tmp_path / "out" / f".tmp-{'0' * 32}-{plan.shards[0].file}"
    leftover.write_bytes(b"of a killed writer")
    os.utime(leftover, (time.time() - 86_500,) * 2)
    younger = tmp_path / "out" / f".tmp-{'1' * 32}-{plan.shards[0].file}"
    younger.write_bytes(b"perhaps of one that lives")
    os.utime(younger, (time.time() - 86_300,) * 2)
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match="of another checkpoint"):
        restore_shards(run, into, Selection(step=2), shard_bytes=1)
    with pytest.raises(SettingsError, match="of this checkpoint, in files of another size"):
        restore_shards(run, into, shard_bytes=1 << 30)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [leftover.name, younger.name, plan.shards[1].file, "config.json"]
    )
    restore_shards(run, into, shard_bytes=1)
    assert left(tmp_path / "out")[plan.shards[1].file] == written  # not once more
    assert not leftover.exists() and younger.exists()
    os.utime(younger, (time.time() - 86_500,) * 2)
    restore_shards(run, into, shard_bytes=1)
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / plan.shards[2].file).unlink()  # whoever removes one gets it back
    restore_shards(run, into, shard_bytes=1)
    require_same(by_index(tmp_path / "out"), in_one_file(run, tmp_path / "one.safetensors"))


def test_a_killed_restore_of_a_run_that_trains_is_gone_on_with_by_name(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, made = chain
    into = open_store(str(tmp_path / "out"))
    plan = plan_shards(run, shard_bytes=1)
    write_shard(run, into, plan, plan.shards[1])
    written = left(tmp_path / "out")[plan.shards[1].file]
    publish(run, build(run, trained(), step=4, generation=1, parent=made[-1], state=STATE))
    with pytest.raises(SettingsError) as refused:
        restore_shards(run, into, shard_bytes=1)
    said = str(refused.value)
    assert "of another checkpoint, step 3 (generation 1)" in said and "step 4" in said, said
    assert "go on with that one: --step 3 --generation 1 (step=3, generation=1 in Python" in said
    assert (
        restore_shards(run, into, Selection(step=3, generation=1), shard_bytes=1).restored.step == 3
    )
    assert left(tmp_path / "out")[plan.shards[1].file] == written
    require_same(
        by_index(tmp_path / "out"),
        in_one_file(run, tmp_path / "one.safetensors", "--step", "3"),
    )


@pytest.mark.parametrize("of", ["another run", "another attempt", "nothing"])
def test_what_cannot_be_gone_on_with_is_not_proposed(
    chain: tuple[Run, list[Manifest]], tmp_path: Path, of: str
) -> None:
    run, _ = chain
    into = open_store(str(tmp_path / "out"))
    if of == "nothing":
        into.create("model-00001-of-00001.safetensors", b"{}")
    elif of == "another run":
        other = new_run(tmp_path / "other")
        other.claim(None)
        publish(other, build(other, trained(), step=1, generation=1, state=STATE))
        restore_shards(other, into, shard_bytes=1)
    else:
        plan = plan_shards(run, shard_bytes=1)
        ref = plan.report.restored.model_copy(update={"attempt": "0" * 32})
        report = replace(plan.report, restored=ref)
        into.create(INDEX, replace(plan, report=report).index)
    words = "of another checkpoint or of other files.* Next: choose another place, or remove what"
    with pytest.raises(SettingsError, match=words):
        restore_shards(run, into, shard_bytes=1)


def test_of_two_writers_of_one_file_either_will_do(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    """The answer of the first is lost, and a slow one comes last."""
    run, _ = chain
    lost = [True]

    def lose(call: str, key: str) -> None:
        if call == "create" and lost.pop():
            lost.append(False)
            raise unavailable(key)

    inner = open_store(str(tmp_path / "out"))
    into: Store = InterposedStore(inner, after=lose)
    plan = plan_shards(run)
    with pytest.raises(StoreUnavailable):
        write_shard(run, into, plan, plan.shards[0])
    assert write_shard(run, into, plan, plan.shards[0]) is None
    finish_shards(into, plan)
    finish_shards(inner, plan)
    require_same(by_index(tmp_path / "out"), in_one_file(run, tmp_path / "one.safetensors"))


def seen_reading(run: Run, look: Callable[[], None]) -> Run:
    """The same run, with `look` called before a chunk is read, by one thread at a time."""
    one = threading.Lock()

    def before(call: str, key: str) -> None:
        if key.startswith("chunks/"):
            with one:
                look()

    return Run.open(InterposedStore(run.store, before=before))


def damage_rows(run: Run, manifest: Manifest) -> None:
    for entry in manifest.chunks:
        if entry.content == "rows":
            run.store.put(entry.key, bytes(entry.bytes))


def test_a_run_that_vanishes_takes_no_finished_file_along(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    """As a mount does: every chunk then reads as if it had never been there."""
    run, _ = chain
    out, away = tmp_path / "out", tmp_path / "away"
    finished: list[dict[str, tuple[int, int, int]]] = []

    def vanish() -> None:
        if not finished and len(list(out.glob("model-*"))) == 2:
            finished.append({name: one for name, one in left(out).items() if name[0] != "."})
            os.rename(run.url, away)
            os.mkdir(run.url)

    with pytest.raises(RecpointError):
        restore_shards(seen_reading(run, vanish), open_store(str(out)), shard_bytes=1)
    assert left(out) == finished[0] and len(finished[0]) == 2
    os.rmdir(run.url)
    os.rename(away, run.url)
    assert restore_shards(run, open_store(str(out)), shard_bytes=1).restored.step == 3
    assert left(out).items() >= finished[0].items()
    require_same(by_index(out), in_one_file(run, tmp_path / "one.safetensors"))


@pytest.mark.parametrize("step", [None, 3])
def test_files_that_count_are_never_taken_back(
    chain: tuple[Run, list[Manifest]], tmp_path: Path, step: int | None
) -> None:
    """They may be the last copy of a checkpoint that has been damaged in the store since."""
    run, made = chain
    out = tmp_path / "out"
    into = open_store(str(out))
    restore_shards(run, into, shard_bytes=1)
    plan = plan_shards(run, shard_bytes=1)
    (out / plan.shards[1].file).unlink()
    before = left(out)
    damage_rows(run, made[2])
    with pytest.raises(RestoreError) as refused:
        restore_shards(run, into, Selection(step=step), shard_bytes=1)
    said = str(refused.value)
    assert f"{INDEX} and 4 of the 5 files of step 3 (generation 1)" in said, said
    assert f"without {plan.shards[1].file}," in said and "DigestMismatch" in said, said
    assert f"recpoint check {run.url} --level full; keep what is there" in said, said
    assert left(out) == before
    with pytest.raises(RestoreError, match=INDEX):
        take_back(into, plan)
    assert left(out) == before


def test_no_index_over_files_that_another_writer_took_back(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, _ = chain
    into = open_store(str(tmp_path / "out"))
    plan = plan_shards(run, shard_bytes=1)
    for shard in plan.shards[:-1]:
        write_shard(run, into, plan, shard)
    take_back(into, plan)  # one writer has met damage
    write_shard(run, into, plan, plan.shards[-1])  # the other one has not
    with pytest.raises(RestoreError, match=f"no {plan.shards[0].file}, .* and 1 more any more"):
        finish_shards(into, plan)
    assert set(left(tmp_path / "out")) == {plan.shards[-1].file}
    restore_shards(run, into, shard_bytes=1)
    require_same(by_index(tmp_path / "out"), in_one_file(run, tmp_path / "one.safetensors"))


def test_files_taken_back_right_before_the_index_are_missed(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, _ = chain
    inner = open_store(str(tmp_path / "out"))
    plan = plan_shards(run, shard_bytes=1)

    def before(call: str, key: str) -> None:
        if (call, key) == ("create", INDEX):
            take_back(inner, plan)

    with pytest.raises(RestoreError, match=f"no {plan.shards[0].file}"):
        restore_shards(run, InterposedStore(inner, before=before), shard_bytes=1)
    restore_shards(run, inner, shard_bytes=1)
    require_same(by_index(tmp_path / "out"), in_one_file(run, tmp_path / "one.safetensors"))


def test_a_writer_that_ends_leaves_the_file_of_one_at_work(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, _ = chain
    out = tmp_path / "out"
    plan = plan_shards(run, shard_bytes=1)
    ended: list[dict[str, tuple[int, int, int]]] = []

    def end_another() -> None:
        if not ended:
            restore_shards(run, open_store(str(out)), shard_bytes=1)
            ended.append(left(out))

    at_work = seen_reading(run, end_another)
    assert write_shard(at_work, open_store(str(out)), plan, plan.shards[-1]) is not None
    (unfinished,) = (name for name in ended[0] if name.endswith(f"-{plan.shards[-1].file}"))
    assert left(out) == {name: one for name, one in ended[0].items() if name != unfinished}
    require_same(by_index(out), in_one_file(run, tmp_path / "one.safetensors"))


def test_a_file_removed_while_it_is_written_is_an_error_of_the_store(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, _ = chain
    out = tmp_path / "out"
    plan = plan_shards(run, shard_bytes=1)

    def remove() -> None:
        for path in out.glob(".tmp-*"):
            path.unlink()

    with pytest.raises(StoreUnavailable, match=f"{plan.shards[0].file}: found no such file"):
        write_shard(seen_reading(run, remove), open_store(str(out)), plan, plan.shards[0])
    assert not left(out)


@pytest.mark.parametrize("there", ["files and index", "the index alone"])
def test_files_of_another_size_are_said_to_be_so(
    chain: tuple[Run, list[Manifest]], tmp_path: Path, there: str
) -> None:
    run, _ = chain
    out = tmp_path / "out"
    into = open_store(str(out))
    restore_shards(run, into, shard_bytes=1500)
    if there == "the index alone":
        for path in out.glob("model-*"):
            path.unlink()
    with pytest.raises(SettingsError) as refused:
        restore_shards(run, into, shard_bytes=1)
    said = str(refused.value)
    assert "of this checkpoint, in files of another size" in said and "another ch" not in said, said
    assert "Next: give the same shard_bytes as before (in Python and of the flow;" in said, said
    restore_shards(run, into, shard_bytes=1500)
    require_same(by_index(out), in_one_file(run, tmp_path / "one.safetensors"))


def test_a_file_that_was_cut_off_is_said_to_be_so(
    chain: tuple[Run, list[Manifest]], tmp_path: Path
) -> None:
    run, _ = chain
    out = tmp_path / "out"
    into = open_store(str(out))
    restore_shards(run, into, shard_bytes=1)
    cut = sorted(out.glob("model-*"))[0]
    os.truncate(cut, cut.stat().st_size - 1)
    with pytest.raises(SettingsError, match="of this very restore, in another length") as refused:
        restore_shards(run, into, shard_bytes=1)
    assert f"Next: remove {cut.name}, which is made again; or" in str(refused.value)
    cut.unlink()
    restore_shards(run, into, shard_bytes=1)
    require_same(by_index(out), in_one_file(run, tmp_path / "one.safetensors"))


# The peak of what is not mapped from a file, after everything has been imported and warmed up.
_PROGRAM = """
import json, sys, threading
from recpoint.catalog.restore.files import restore_shards
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) << 10 for l in status if l.startswith("RssAnon"))

run = Run.open(open_store(sys.argv[1]))
restore_shards(run, open_store(sys.argv[2] + "/small"), Selection(step=1))
idle = peak = anonymous_bytes()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
restore_shards(run, open_store(sys.argv[2] + "/large"), Selection(step=2))
done.set()
watcher.join()
print(json.dumps((peak - idle) / 1e6))
"""


def test_a_table_larger_than_its_share_of_memory(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    for step, rows in ((1, 1000), (2, 1_600_000)):
        values = torch.zeros(rows, 64)
        values[:, 0] = torch.arange(rows)
        checkpoint = build(
            run, [Table("t", values)], step=step, generation=1, state={}, rows_per_chunk=60_000
        )
        publish(run, checkpoint)
        del checkpoint
    answer = run_program(_PROGRAM, run.url, str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    with safe_open(next((tmp_path / "large").glob("model-*")), framework="pt") as file:
        assert torch.equal(file.get_tensor("t.weight"), values)
    # Of a table of 410 MB. Four threads let seven chunks of 15 MB be there at once, the one that is
    # being used and the one after it included: 108, and what is around them.
    assert json.loads(answer.stdout) < 125


def test_a_header_that_safetensors_would_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """safetensors reads a header of 100,000,000 bytes and no longer one."""
    for beyond, refusal in ((0, "header length"), (8, "header too large")):
        prefix = (MAX_HEADER_BYTES + beyond).to_bytes(8, "little")
        with pytest.raises(SafetensorError, match=refusal):
            load(prefix + b"{}")
    shard = ShardFile(
        "many.safetensors", (ShardTensor("x", "U8", (1,)), ShardTensor("y", "U8", (1,)))
    )
    header_bytes = len(shard.header({})) - 8
    monkeypatch.setattr(shard_plan, "MAX_HEADER_BYTES", header_bytes)
    assert load(shard.header({}) + bytes(2)).keys() == {"x", "y"}
    monkeypatch.setattr(shard_plan, "MAX_HEADER_BYTES", header_bytes - 1)
    with pytest.raises(SettingsError, match=f"2 tensors, whose header takes {header_bytes} bytes"):
        shard.header({})


def test_units_share_a_file_only_if_its_header_can_be_read(
    chain: tuple[Run, list[Manifest]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = chain
    assert len(plan_shards(run).shards) == 1
    monkeypatch.setattr(shard_plan, "MAX_HEADER_BYTES", 1024)
    plan = plan_shards(run)
    assert len(plan.shards) > 1
    assert all(len(shard.header(plan.metadata)) <= 1024 + 8 for shard in plan.shards)
    (into := tmp_path / "into").mkdir()
    restore_shards(run, open_store(str(into)))
    require_same(by_index(into), in_one_file(run, tmp_path / "one.safetensors"))
    monkeypatch.setattr(shard_plan, "MAX_HEADER_BYTES", 64)
    with pytest.raises(SettingsError, match="at most 64 bytes, which safetensors reads"):
        plan_shards(run)
