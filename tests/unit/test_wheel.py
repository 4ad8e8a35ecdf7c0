"""What a wheel installs is all that the demo and the deployments need: no checkout is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.wheel import ROOT, InstalledWheel

pytestmark = [pytest.mark.nightly("wheel"), pytest.mark.xdist_group("wheel")]


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


def test_one_library_serves_all_pythons_and_brings_no_sources(
    wheel: InstalledWheel, tmp_path: Path
) -> None:
    assert "-cp311-abi3-" in wheel.path.name
    assert [path.name for path in wheel.site.rglob("*.so")] == ["_native.abi3.so"]
    assert not [path for kind in ("*.cpp", "*.h") for path in wheel.site.rglob(kind)]
    program = "from recpoint.kernels import native; print(native.__file__)"
    found = wheel.run(["-c", program], directory=tmp_path, home=tmp_path)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).is_relative_to(wheel.site)


def test_the_metadata_names_files_without_links_that_an_index_would_break(
    wheel: InstalledWheel,
) -> None:
    (metadata,) = wheel.site.glob("recpoint-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "](docs/" in (ROOT / "README.md").read_text() and "](" not in text
    assert "| | measured (`docs/understanding/benchmarks.md`) |" in text


def test_the_live_page_has_its_style(wheel: InstalledWheel, tmp_path: Path) -> None:
    pytest.importorskip("nicegui", reason="nicegui is not installed")
    program = "from recpoint.dashboards import page_elements as e; print(e.__file__, len(e.STYLE))"
    found = wheel.run(["-c", program], directory=tmp_path, home=tmp_path)
    assert found.returncode == 0, found.stderr
    file, length = found.stdout.split()
    assert Path(file).is_relative_to(wheel.site) and int(length) > 1000


def test_deployments_begin_with_the_file_of_the_repository(
    wheel: InstalledWheel, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    command = ["-m", "recpoint", "deployments", "init"]
    done = wheel.run(command, directory=empty, home=tmp_path)
    assert done.returncode == 0 and "wrote prefect.yaml" in done.stdout, done.stderr
    written = empty / "prefect.yaml"
    assert written.read_bytes() == (ROOT / "prefect.yaml").read_bytes()

    elsewhere = wheel.run([*command, "new/folder", "--json"], directory=empty, home=tmp_path)
    assert json.loads(elsewhere.stdout) == {"written": "new/folder/prefect.yaml"}

    written.write_text("mine")
    refused = wheel.run([*command, "--json"], directory=empty, home=tmp_path)
    assert refused.returncode == 2 and json.loads(refused.stdout)["subject"] == "prefect.yaml"
    assert written.read_text() == "mine"
