"""What a wheel installs is all that the demo and the deployments need: no checkout is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.wheel import InstalledWheel

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> InstalledWheel:
    return InstalledWheel(tmp_path_factory.mktemp("wheel"))


def test_the_demo_is_there_and_trains_on_data_that_has_its_licence(
    wheel: InstalledWheel, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    told = wheel.run(["-m", "recpoint", "demo", "--help"], directory=empty, home=tmp_path)
    assert told.returncode == 0 and "SIGKILL" in told.stdout, told.stderr

    program = "from recpoint.dashboards.demo import demo; print(demo.example_script())"
    found = wheel.run(["-c", program], directory=empty, home=tmp_path)
    assert found.returncode == 0, found.stderr
    script = Path(found.stdout.strip())
    assert script.is_relative_to(wheel.site)
    trained = wheel.run([str(script), "--steps=3"], directory=empty, home=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout.splitlines()[-1])["steps"] == 3

    assert "CC BY 4.0" in (script.parent / "data" / "README.md").read_text()
    assert not list(empty.iterdir())
