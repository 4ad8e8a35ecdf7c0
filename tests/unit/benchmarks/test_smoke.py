"""Every benchmark with tiny sizes: four by day, all others by night.

No figure's value is looked at. Whether results are correct, each benchmark checks before it
measures, and it ends with an error if they are not.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NAMES, main
from benchmarks.servers.network import NoNetwork, ShapedNetwork
from benchmarks.torchrec_tracker import installed
from recpoint.installation import install_command
from tests.torch_interpreter import run_program

ROOT = Path(__file__).resolve().parents[3]

#: By day; they start no process and train little. `make nightly` runs all others.
BY_DAY = {"policy", "retention", "row_set", "snapshot"}
#: On a busy machine, those that start a dozen processes for each comparison take minutes.
PATIENCE_SECONDS = 900.0
#: They count, and compare no times.
UNTIMED = {
    "accuracy",
    "bytes",
    "faults",
    "fleet",
    "increments",
    "policy",
    "price_accuracy",
    "soak",
}


def run(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """What `python -m benchmarks` does, where torch is there already."""
    program = f"import sys\n{before}\nfrom benchmarks.__main__ import main\n"
    program += "sys.exit(main(sys.argv[1:]))"
    return run_program(program, *arguments, directory=ROOT, timeout=PATIENCE_SECONDS)


def not_run_here(name: str) -> set[str]:
    """Figures that this machine cannot measure."""
    lacks = {
        "gpu": not torch.cuda.is_available(),
        "fulls": not installed(),
        "torchrec": not installed(),
        "tracking": not installed(),
        "quantize": importlib.util.find_spec("fbgemm_gpu") is None,
    }
    keys: set[str] = set(importlib.import_module(f"benchmarks.{name}").KEYS)
    if name == "servers":
        return _not_run_of_servers()
    if name == "parity":
        return _not_run_of_parity()
    of = {
        "gpu": keys,
        "torchrec": keys,
        "tracking": {k for k in keys if "torchrec" in k} | {"our_bytes"},
    }
    return of.get(name, {"plain4_vs_fbgemm"}) if lacks.get(name) else set()


def _not_run_of_servers() -> set[str]:
    from benchmarks.servers import KEYS, NETWORK_KEYS

    found = set() if importlib.util.find_spec("ray") else {key for key in KEYS if "ray_" in key}
    if not installed():
        found.add("vs_torchrec")
    return found if _has_network() else found | set(NETWORK_KEYS)


def _not_run_of_parity() -> set[str]:
    from benchmarks.parity import NETWORK_KEYS

    found = set() if importlib.util.find_spec("pyeclib") else {"vs_pyeclib"}
    return found if _has_network() else found | set(NETWORK_KEYS)


def _has_network() -> bool:
    try:
        with ShapedNetwork() as network:
            network.add_nodes(1)
    except NoNetwork:
        return False
    return True


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly("benchmarks")])
        for name in NAMES
    ],
)
def test_it_runs_and_has_its_figures(name: str) -> None:
    done = run(name, "--smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout.splitlines()[-1], parse_constant=pytest.fail)
    assert (document["name"], document["smoke"]) == (name, True)
    figures, not_run = document["figures"], document["not_run"]
    # Of a machine as slow as one of tiny tables, no interval may be long enough.
    too_slow = {key for key in not_run if name == "scale" and key.startswith("shortest_min_")}
    assert not_run.keys() - too_slow == not_run_here(name)
    assert figures.keys() == set(importlib.import_module(f"benchmarks.{name}").KEYS) - set(not_run)
    for key, reason in not_run.items():
        assert f"{key}: not run: {reason}" in done.stdout
    assert document["spreads"].keys() <= figures.keys()
    for key, spread in document["spreads"].items():
        assert spread["rounds"] > 0 and spread["least"] <= spread["most"], key
    assert bool(document["times"]) is (name not in UNTIMED and bool(figures))
    for what, spread in document["times"].items():
        assert 0 < spread["least"] <= spread["median"] <= spread["most"], what
    assert document["busy"]["seconds"] > 0 and document["busy"]["others_share"] >= 0


def test_without_a_package_it_is_not_run() -> None:
    done = run("persist", before="sys.modules['psutil'] = None")
    assert done.returncode == 0, done.stderr
    assert f"psutil is not installed: {install_command('bench')}" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["figures"] == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["all", "--smoke"],
        ["policy", "--out", "here"],
        ["policy", "--only", "gpu"],
        ["policy", "--quick"],
        ["policy", "--system", "recpoint"],
        ["policy", "--directory", "here"],
        ["faults", "--fault", "no such fault"],
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "error:" in capsys.readouterr().err
