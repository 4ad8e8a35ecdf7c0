"""The parts of the demo that can be tried without training anything."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recpoint.dashboards.demo import demo
from recpoint.dashboards.demo.processes import Child, ChildFailed, RanksTrainer, Trainer, ended
from recpoint.dashboards.demo.settings import DemoSettings
from recpoint.errors import SettingsError
from tests.polling import until


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"bits": "7"}, "--bits"),
        ({"interval": 0}, "--interval"),
        ({"interval": -1}, "--interval"),
        ({"steps": 100, "interval": 26}, "--steps"),
        ({"ranks": 0}, "--ranks"),
        ({"ranks": 17}, "--ranks"),
        ({"servers": 5, "parity": "4"}, "--parity"),
        ({"servers": 4, "parity": "4+1"}, "Parity(data=4, parity=1)"),
        ({"parity": "2+3"}, "Parity(parity=...)"),
        ({"ranks": 2, "lookahead": True}, "--lookahead"),
        ({"servers": 17}, "--servers"),
        ({"servers": 2, "lookahead": True}, "--lookahead"),
        ({"home": Path("rows"), "lookahead": True}, "--lookahead"),
        ({"home": Path("rows"), "servers": 2}, "--home"),
        ({"home": Path("rows"), "ranks": 2}, "--home"),
        ({"keyed": True, "ranks": 2}, "--keyed"),
        ({"keyed": True, "lookahead": True}, "--keyed"),
        ({"keyed": True, "home": Path("rows")}, "--keyed"),
        ({"keyed": True, "servers": 2}, "--keyed"),
    ],
)
def test_settings_that_show_nothing_are_refused(
    tmp_path: Path, options: dict[str, Any], setting: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        DemoSettings(directory=tmp_path, **options)
    assert caught.value.subject == setting


def test_only_the_directory_of_a_demo_is_emptied(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(SettingsError, match="--dir"):
        demo.make_fresh(mine)
    with pytest.raises(SettingsError, match="--dir"):
        demo.make_fresh(mine / "thesis.txt")
    assert (mine / "thesis.txt").read_text() == "precious"

    fresh = tmp_path / "a" / "demo"
    demo.make_fresh(fresh)
    (fresh / "run").mkdir()
    (fresh / "run" / "run.json").write_text("{}")
    (fresh / "elsewhere").symlink_to(mine)
    demo.make_fresh(fresh)
    assert len(list(fresh.iterdir())) == 1
    # A link is removed, not followed.
    assert (mine / "thesis.txt").read_text() == "precious"


def test_the_example_is_found() -> None:
    assert demo.example_script().is_file()


def has_said(child: Child, text: str) -> bool:
    return text in child.log.read_text()


def test_a_child_that_fails_is_told_with_what_it_printed_last(tmp_path: Path) -> None:
    program = "print('one'); print('two', flush=True); raise SystemExit(3)"
    child = Child("trainer", ["-c", program], log=tmp_path / "log")
    with pytest.raises(ChildFailed, match="exit code 3.*\none\ntwo"):
        until(child.check)


def test_every_child_has_ended_whatever_happens(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True) or exit(0))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    children: list[Child] = []
    with pytest.raises(ZeroDivisionError), ended(children):
        for number in range(3):
            children.append(Child("child", ["-c", stubborn], log=tmp_path / f"log{number}"))
        for child in children:
            until(partial(has_said, child, "ready"))
        children[1].stop()  # a stopped process hears nothing until it goes on
        children[2].kill()
        raise ZeroDivisionError
    assert not any(child.running for child in children)
    assert ["told" in child.output() for child in children] == [True, True, False]


def test_children_end_when_the_demo_is_told_to(tmp_path: Path) -> None:
    children = [Child("child", ["-c", "import time; time.sleep(600)"], log=tmp_path / "log")]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, ended(children):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert caught.value.code == 128 + signal.SIGTERM
    assert not children[0].running
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_trainer_is_followed_through_its_files(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, json\n"
        "path = sys.argv[2].partition('=')[2]\n"
        "with open(path, 'w') as file:\n"
        '    file.write(\'{"step": 1}\\n{"step": 2}\\n{"ste\')\n'
        "print('warning: something')\n"
        "print(json.dumps({'steps': 2, 'stalls_ms': [1.5] * 5000}))\n"
    )
    trainer = Trainer("killed", script, [], directory=tmp_path, steps=2)
    until(lambda: not trainer.running)
    # The last line is not whole: the process was killed while it wrote it.
    assert trainer.step == 2
    assert trainer.result()["steps"] == 2

    script.write_text("print('no result')")
    silent = Trainer("resumed", script, [], directory=tmp_path, steps=2)
    until(lambda: not silent.running)
    assert silent.step == 0
    with pytest.raises(ChildFailed, match="no result"):
        silent.result()


def test_ranks_that_are_stopped_end_with_the_demo(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, time\n"
        "path, rank = sys.argv[2].partition('=')[2], int(os.environ['RANK'])\n"
        "path = path if rank == 0 else path.replace('.jsonl', f'.rank{rank}.jsonl')\n"
        "with open(path, 'w') as file:\n"
        "    file.write(json.dumps({'step': 1 + rank, 'pid': os.getpid()}) + '\\n')\n"
        "time.sleep(600)\n"
    )
    children: list[Child] = []
    with pytest.raises(ZeroDivisionError), ended(children):
        trainer = RanksTrainer("killed", script, [], directory=tmp_path, steps=2, ranks=2)
        children.append(trainer)
        # A file that a rank has opened is empty until the rank closes it.
        until(
            lambda: sum(file.read_text().endswith("\n") for file in tmp_path.glob("*.jsonl")) == 2
        )
        assert trainer.step == 2
        trainer.stop()
        raise ZeroDivisionError
    assert not trainer.running
    for file in tmp_path.glob("*.jsonl"):
        command_line = Path("/proc", str(json.loads(file.read_text())["pid"]), "cmdline")
        assert not command_line.exists() or not command_line.read_bytes()
