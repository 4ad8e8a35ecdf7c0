"""follow and publish on real committed checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.catalog_builder import new_run, tables
from tests.consolidation import spoil, trained
from tests.polling import PATIENCE_SECONDS
from tests.unit.cli.conftest import Invoke


def made(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trained(run, tables(), [1, 2, 3])
    return run


def test_looks_once(recpoint: Invoke, tmp_path: Path) -> None:
    run = made(tmp_path)
    document = recpoint("follow", run.url, "--once", "--json").json
    assert (document["step"], document["lag_seconds"], document["error"]) == (3, 0.0, None)
    assert (document["fulls_applied"], document["increments_applied"]) == (1, 2)
    text = recpoint("follow", run.url, "--once", "--table", "items", "--quantized").stdout
    assert "step 3" in text and "1 full applied" in text
    ended = recpoint("follow", run.url, "--once", "--channel", "published", "--json")
    assert ended.code == 1 and "channel published" in ended.json["expected"]
    assert ended.json["next_step"] == f"recpoint publish {run.url}"
    assert recpoint("follow", run.url, "--once", "--channel", "best").code == 2
    ended = recpoint("follow", run.url, "--once", "--channel", "validated", "--json")
    assert ended.json["found"] == "3 checkpoints, steps 1 … 3: not validated"
    assert ended.json["next_step"] == f"recpoint validate {run.url}"


def test_publishes_and_goes_back(recpoint: Invoke, tmp_path: Path) -> None:
    run = made(tmp_path)
    document = recpoint("publish", run.url, "--json").json
    assert (document["step"], document["number"], document["held"]) == (3, 1, False)
    text = recpoint("publish", run.url, "--step", 2, "--why", "3 is bad").stdout
    assert "publication 2, held until --release" in text
    served = recpoint("follow", run.url, "--once", "--channel", "published", "--json").json
    assert served["step"] == 2
    refused = recpoint("publish", run.url, "--json")
    assert refused.code != 0 and "--release" in refused.json["next_step"]
    refused = recpoint("publish", run.url, "--step", 1, "--json")  # a hold is for those too
    assert refused.code != 0 and "--step 1 --release" in refused.json["next_step"]
    assert recpoint("publish", run.url, "--step", 2).code == 0  # as it is
    assert recpoint("publish", run.url, "--step", 1, "--release", "--json").json["step"] == 1
    assert recpoint("publish", run.url, "--release", "--json").json["step"] == 3
    assert "was published already" in recpoint("publish", run.url).stdout
    assert recpoint("publish", run.url, "--generation", 1).code == 2
    assert recpoint("publish", run.url, "--validated").code == 1
    assert recpoint("publish", run.url, "--step", 3, "--validated", "--release").code == 2


def test_a_failed_validation_is_told_by_who_publishes_and_who_follows(
    recpoint: Invoke, tmp_path: Path
) -> None:
    run = made(tmp_path)
    spoil(run, run.manifest(3, 1))
    refused = recpoint("publish", run.url, "--step", 3, "--json")
    assert refused.code == 1 and "validation 1" in refused.json["found"]
    assert refused.json["next_step"].startswith(f"recpoint validate {run.url} --step 3 says")
    text = recpoint("publish", run.url, "--step", 3, "--force").stdout
    assert "held until --release" in text and "although validation 1 found wrong" in text
    forced = recpoint("publish", run.url, "--step", 3, "--force", "--json").json
    assert forced["doubt"] == "validation 1 found wrong or damaged rows"
    assert recpoint("publish", run.url, "--step", 2, "--release", "--json").json["doubt"] is None
    # What is served may fail later; here its bytes are put back after that.
    manifest = run.manifest(2, 1)
    before = {chunk.key: run.store.get(chunk.key, max_bytes=1 << 26) for chunk in manifest.chunks}
    spoil(run, manifest)
    for key, data in before.items():
        run.store.put(key, data)
    served = recpoint("follow", run.url, "--once", "--channel", "published", "--json").json
    assert (served["step"], served["doubt"]) == (2, "validation 1 found wrong or damaged rows")
    text = recpoint("follow", run.url, "--once", "--channel", "published").stdout
    assert "is served although validation 1 found wrong" in text
    refused = recpoint("publish", run.url, "--json")
    assert "held by" in refused.json["found"] and "by now validation 1" in refused.json["found"]


def _next(lines: IO[str]) -> dict[str, Any]:
    found = json.loads(lines.readline())
    assert isinstance(found, dict)
    return found


def test_prints_each_version_until_it_is_interrupted(tmp_path: Path) -> None:
    run = made(tmp_path)
    command = [sys.executable, "-m", "recpoint", "follow", run.url, "--poll-seconds", "0.05"]
    # As most shells have it: else Python writes each line at once by itself.
    environment = {n: value for n, value in os.environ.items() if n != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        assert _next(process.stdout)["step"] == 3
        trained(Run.open(open_store(run.url)), tables(seed=4), [8])
        assert _next(process.stdout)["step"] == 8
        process.send_signal(signal.SIGINT)
        assert _next(process.stdout)["error"] == "KeyboardInterrupt"
        assert process.wait(PATIENCE_SECONDS) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
