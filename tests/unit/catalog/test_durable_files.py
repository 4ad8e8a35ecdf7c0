"""What `durable` does to a disk, step by step, whoever dies in between."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recpoint.catalog.store import durable
from recpoint.testing import die_at
from tests.forked_program import run_module


@pytest.fixture
def steps() -> Iterator[list[str]]:
    seen: list[str] = []
    durable.set_observer(seen.append)
    yield seen
    durable.set_observer(None)


def test_a_replacement_is_written_synced_renamed_synced(tmp_path: Path, steps: list[str]) -> None:
    durable.write_atomically(tmp_path / "f", b"one")
    assert steps == ["write f", "fsync f", "rename f", f"fsync directory {tmp_path.name}"]
    durable.write_atomically(tmp_path / "f", bytearray(b"two"))
    durable.write_atomically(str(tmp_path / "f"), memoryview(b"three"))
    assert (tmp_path / "f").read_bytes() == b"three"
    assert os.listdir(tmp_path) == ["f"]


def test_a_creation_is_decided_by_the_link(tmp_path: Path, steps: list[str]) -> None:
    durable.create_exclusively(tmp_path / "f", b"one")
    synced = f"fsync directory {tmp_path.name}"
    assert steps == ["write f", "fsync f", "link f", "unlink temporary of f", synced]
    steps.clear()
    with pytest.raises(FileExistsError):
        durable.create_exclusively(tmp_path / "f", b"two")
    assert steps[-1] == synced  # the winner may have died before it could
    assert (tmp_path / "f").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["f"]


def test_new_directories_are_synced_into_the_ones_above(tmp_path: Path, steps: list[str]) -> None:
    durable.make_directory(tmp_path / "a" / "b")
    assert steps == ["mkdir a", f"fsync directory {tmp_path.name}", "mkdir b", "fsync directory a"]
    steps.clear()
    durable.make_directory(tmp_path / "a" / "b")
    assert steps == []
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        durable.make_directory(tmp_path / "f" / "b")


def test_removing_is_synced_and_may_be_repeated(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / "f").write_bytes(b"")
    durable.remove(tmp_path / "f")
    assert steps == ["unlink f", f"fsync directory {tmp_path.name}"]
    durable.remove(tmp_path / "f")
    durable.remove(tmp_path / "no" / "f")
    assert not (tmp_path / "f").exists()


def test_files_are_synced_by_path_and_by_descriptor(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / "f").write_bytes(b"")
    durable.fsync_file(tmp_path / "f")
    with (tmp_path / "f").open("rb") as file:
        durable.fsync_file(file.fileno())
    assert steps == ["fsync f", "fsync open file"]


def test_what_an_observer_raises_stops_the_step(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(name: str) -> None:
        if name.startswith("rename"):
            raise Stop

    (tmp_path / "f").write_bytes(b"old")
    durable.set_observer(stop)
    try:
        with pytest.raises(Stop):
            durable.write_atomically(tmp_path / "f", b"new")
    finally:
        durable.set_observer(None)
    assert (tmp_path / "f").read_bytes() == b"old"


_PROGRAM = """
import sys
from recpoint.catalog.store.store import open_store
from recpoint.errors import ObjectExists
store = open_store(sys.argv[1])
for key, data in [("a/one", b"1" * 1000), ("a/two", b"2" * 1000)]:
    try:
        store.create(key, data)
    except ObjectExists:
        assert store.get(key, max_bytes=1000) in (data, b"3" * 1000)
store.put("a/one", b"3" * 1000)
store.delete("a/two")
print("done")
"""


def _die_at(how: list[str], *program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recpoint.testing.die_at", *how, *map(str, program)],
        capture_output=True,
        text=True,
        timeout=240,
    )


def _forked_die_at(
    directory: Path, how: list[str], *program: Path
) -> subprocess.CompletedProcess[str]:
    arguments = ["recpoint.testing.die_at", *how, *map(str, program)]
    return run_module(arguments, environment=os.environ, directory=directory)


def test_killed_at_every_step_each_object_is_whole_or_not_there(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    forked = functools.partial(_forked_die_at, tmp_path)
    counted = forked(["--count", str(tmp_path / "steps")], program, tmp_path / "counted")
    assert counted.stdout == "done\n", counted.stderr
    lines = (tmp_path / "steps").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [str(n) for n in range(1, len(lines) + 1)]
    assert sum(line.endswith("\tlink one") for line in lines) == 1
    # Neighbouring fsyncs leave the same state behind when a process dies: one of them is enough.
    telling = [n for n, line in enumerate(lines, 1) if "fsync" not in line.split("\t")[2]]
    beyond = [str(len(lines) + 1)]
    for number in telling:
        run = tmp_path / f"run-{number}"
        killed = forked([str(number)], program, run)
        assert killed.returncode == -9, (number, killed.stderr)
        _check(run)
        # Started again, it finishes, and a sweep of what is unfinished leaves nothing of it.
        again = forked(beyond, program, run)
        assert again.stdout == "done\n", (number, again.stderr)
        _check(run, finished=True)
    survived = forked(beyond, program, tmp_path / "beyond")
    assert survived.returncode == 0 and survived.stdout == "done\n"


def test_children_count_and_die_too_when_asked_to(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import subprocess, sys\n"
        "child = subprocess.run([sys.executable, sys.argv[1], sys.argv[2]])\n"
        "print(child.returncode)\n"
    )
    counted = tmp_path / "steps"
    alone = _die_at(["--count", str(counted)], parent, program, tmp_path / "one")
    assert alone.stdout.endswith("0\n"), alone.stderr
    assert not counted.exists()
    together = _die_at(["--count", str(counted), "--children"], parent, program, tmp_path / "two")
    assert together.stdout.endswith("0\n"), together.stderr
    assert counted.read_text().startswith("1\t")
    killed = _die_at(["3", "--children"], parent, program, tmp_path / "three")
    assert killed.stdout == "-9\n", killed.stderr


@pytest.mark.parametrize("arguments", [[], ["0", "x.py"], ["-m", "json"], ["3"], ["--count"]])
def test_a_wrong_command_line_is_answered_with_the_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage: die_at"):
        die_at.main(arguments)


def _check(run: Path, *, finished: bool = False) -> None:
    from recpoint.catalog.store.store import open_store

    store = open_store(str(run))
    allowed = {"a/one": [b"1" * 1000, b"3" * 1000], "a/two": [b"2" * 1000]}
    for info in store.list():
        assert store.get(info.key, max_bytes=1000) in allowed[info.key]
    if finished:
        for info in list(store.list_unfinished()):
            store.delete_unfinished(info.key)
        assert [path.name for path in (run / "a").iterdir()] == ["one"]
