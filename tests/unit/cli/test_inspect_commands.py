"""list, show, check and sweep on real committed checkpoints, good and damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recpoint.cli import inspect
from recpoint.dashboards.terminal import quantizer_text
from recpoint.format.history import ChosenPrecision, History
from recpoint.format.manifest import CopiedAhead, MeasuredLoss, Quantizer
from recpoint.format.naming import MANIFEST_KEY
from recpoint.format.records import pack_record
from tests.catalog_builder import UNTRAINED, build, new_run, publish, tables, upload
from tests.interposed_store import InterposedStore
from tests.unit.cli.conftest import Invoke, SavedRun


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flat(text: str) -> str:
    """Without the line ends of a narrow terminal."""
    return " ".join(text.split())


# --- list --------------------------------------------------------------------------------------


def test_list_shows_what_counts_newest_first(recpoint: Invoke, saved_run: SavedRun) -> None:
    ended = recpoint("list", saved_run.directory, "--json")
    assert ended.code == 0
    found = ended.json["checkpoints"]
    assert [(entry["step"], entry["kind"]) for entry in found] == [
        (30, "increment"),
        (20, "increment"),
        (10, "full"),
    ]
    newest = saved_run.manifests[30]
    assert found[0]["stored_bytes"] == newest.stored_bytes
    assert found[0]["stall_ms"] == 0.1
    assert found[0]["lag_ms"] == 2
    assert found[0]["attempt"] == newest.attempt
    assert all(entry["live"] for entry in found)


def test_list_and_show_say_what_was_copied_before_the_stall(
    recpoint: Invoke, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    publish(run, build(run, tables(), step=10, generation=1))
    built = build(run, tables(), step=20, generation=1)
    copied = CopiedAhead(rows_before=992, bytes_before=99_200, rows_in_stall=8, bytes_in_stall=800)
    publish(
        run, replace(built, manifest=built.manifest.model_copy(update={"copied_ahead": copied}))
    )
    newest, oldest = recpoint("list", run.url, "--json").json["checkpoints"]
    assert newest["copied_ahead"] == copied.model_dump() and oldest["copied_ahead"] is None
    assert recpoint("show", run.url, "20", "--json").json["copied_ahead"] == copied.model_dump()
    shown = flat(recpoint("show", run.url, "20").stdout)
    assert "0.1 ms; 99.2% of 1,000 rows copied before the stall (99.2 kB, and 800 B in it)" in shown
    assert "copied" not in flat(recpoint("show", run.url, "10").stdout)


def test_list_and_show_tell_the_policy(recpoint: Invoke, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    first = build(run, tables(), step=10, generation=1)
    publish(run, first)
    then = build(run, tables(), step=20, generation=1)
    changed = then.manifest.model_copy(update={"policy": "intermittent"})
    publish(run, replace(then, manifest=changed))
    found = recpoint("list", tmp_path / "run", "--json").json["checkpoints"]
    assert [entry["policy"] for entry in found] == ["intermittent", "consecutive"]
    assert "policy: intermittent, consecutive" in recpoint("list", tmp_path / "run").stdout
    assert recpoint("show", tmp_path / "run", "20", "--json").json["policy"] == "intermittent"
    assert re.search(
        r"^ *policy +intermittent", recpoint("show", tmp_path / "run", "20").stdout, re.M
    )


def test_list_all_shows_superseded_checkpoints_too(recpoint: Invoke, saved_run: SavedRun) -> None:
    found = recpoint("list", saved_run.directory, "--all", "--json").json["checkpoints"]
    assert [(entry["step"], entry["live"]) for entry in found] == [
        (30, True),
        (25, False),
        (20, True),
        (10, True),
    ]
    table = recpoint("list", saved_run.directory, "--all").stdout
    assert re.findall(r"^ *([0-9]+) .* superseded$", table, re.MULTILINE) == ["25"]


def test_list_calls_no_checkpoint_superseded_that_is_committed_meanwhile(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    publish(run, build(run, tables(), step=10, generation=1))
    listings: list[str] = []

    def before(call: str, key: str) -> None:
        if call == "list":
            listings.append(key)
            publish(run, build(run, tables(), step=10 + len(listings), generation=1))

    store = InterposedStore(run.store, before=before)
    monkeypatch.setattr(inspect, "open_store", lambda url: store)
    found = recpoint("list", run.url, "--all", "--json").json
    assert [entry["live"] for entry in found["checkpoints"]] == [True] * len(found["checkpoints"])
    assert found["superseded"] == 0 and len(listings) > 2


def test_a_line_without_checkpoints_is_told_of_with_what_it_superseded(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    saved_run.run.claim(None)
    listed = recpoint("list", saved_run.directory)
    told = "4 superseded, the newest step 30 (generation 2)"
    assert listed.code == 0 and told in flat(listed.stdout) and "--all" in listed.stdout
    assert recpoint("list", saved_run.directory, "--json").json["superseded"] == 4
    checked = recpoint("check", saved_run.directory)
    assert checked.code == 1 and told in flat(checked.stdout)
    assert "nothing counts yet" in flat(checked.stdout) and "damaged" not in checked.stdout
    assert "nothing to restore: 0 of 0 live checkpoints" in flat(checked.stdout)
    document = recpoint("check", saved_run.directory, "--json").json
    assert document["ok"] and document["nothing_counts"]
    (found,) = (found for found in document["findings"] if found["severity"] != "info")
    assert found["severity"] == "warning"
    assert found["key"] == "generations/00000003.json"
    restored = recpoint("restore", saved_run.directory, "--to", saved_run.directory / "x.pt")
    assert restored.code == 1 and told in flat(restored.stderr)


def test_a_run_without_checkpoints(recpoint: Invoke, tmp_path: Path) -> None:
    """As a trainer leaves it that nobody persists for yet."""
    new_run(tmp_path / "run").claim(None)
    for options in ((), ("--all",)):
        listed = recpoint("list", tmp_path / "run", *options)
        assert listed.code == 0 and "no checkpoint yet" in flat(listed.stdout)
        assert recpoint("list", tmp_path / "run", *options, "--json").json["checkpoints"] == []
    checked = recpoint("check", tmp_path / "run")
    assert checked.code == 1
    assert "nothing to restore: 0 of 0 live checkpoints" in flat(checked.stdout)
    document = recpoint("check", tmp_path / "run", "--json").json
    assert document["ok"] and document["nothing_counts"] and not document["findings"]


def test_a_run_whose_manifests_are_gone(recpoint: Invoke, saved_run: SavedRun) -> None:
    """It is not taken for a new one: somebody may have them."""
    shutil.rmtree(Path(saved_run.directory) / "manifests")
    told = "and nothing is under manifests/ any more"
    for options in ((), ("--all",)):
        listed = recpoint("list", saved_run.directory, *options)
        assert listed.code == 1 and told in flat(listed.stdout)
        document = recpoint("list", saved_run.directory, *options, "--json").json
        assert document["checkpoints"] == [] and told in document["message"]
    checked = recpoint("check", saved_run.directory)
    assert checked.code == 1 and told in flat(checked.stdout)
    restored = recpoint("restore", saved_run.directory, "--to", saved_run.directory / "x.pt")
    assert restored.code == 1 and told in flat(restored.stderr)


def test_list_cuts_no_figure_in_a_terminal_of_80_columns(
    recpoint: Invoke, saved_run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = recpoint("list", saved_run.directory).stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = recpoint("list", saved_run.directory).stdout
    assert max(map(len, narrow.splitlines()[1:])) <= 80 < max(map(len, wide.splitlines()))
    assert "…" not in narrow
    for figure in re.findall(r"[0-9.]+ (?:kB|ms|s)\b|increment", wide):
        assert figure in narrow
    times = re.findall(r"2[0-9]{3}-[0-9]{2}-[0-9]{2} [0-9:]{8}", wide)
    assert len(times) == 3 and all(time in narrow for time in times)


def test_list_tells_what_is_to_note_of_a_checkpoint_below_it_in_80_columns(
    recpoint: Invoke, saved_run: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    recpoint("pin", saved_run.directory, 20, "--name", "the-november-release")
    wide = recpoint("list", saved_run.directory).stdout.splitlines()
    assert wide[1].endswith("notes") and wide[3].endswith("pinned (the-november-release)")
    monkeypatch.setenv("COLUMNS", "80")
    narrow = recpoint("list", saved_run.directory).stdout.splitlines()
    at = narrow.index("      pinned (the-november-release)")
    assert narrow[at - 1].lstrip().startswith("20 ") and max(map(len, narrow[1:])) <= 80


def test_list_comes_out_whole_although_a_manifest_is_damaged(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    damage(saved_run.directory / MANIFEST_KEY.of(20, 1))
    ended = recpoint("list", saved_run.directory, "--json")
    assert ended.code == 0
    steps = {entry["step"]: entry for entry in ended.json["checkpoints"]}
    assert "kind" in steps[30] and "kind" in steps[10]
    assert steps[20]["error"] in ("DigestMismatch", "MalformedObject")
    assert MANIFEST_KEY.of(20, 1) in steps[20]["message"]
    assert f"recpoint check {saved_run.directory}" in steps[20]["message"]
    shown = recpoint("list", saved_run.directory)
    assert shown.code == 0
    assert re.search(r"^ *20 +1 +damaged *$", shown.stdout, re.MULTILINE)
    assert f"step 20 (generation 1): {steps[20]['error']}" in shown.stdout


def test_a_directory_that_is_no_run_is_nothing_to_restore(recpoint: Invoke, tmp_path: Path) -> None:
    for command in (["list"], ["show", "1"], ["check"], ["sweep"], ["restore", "--to", "x.pt"]):
        name, *rest = command
        ended = recpoint(name, tmp_path, *rest)
        assert ended.code == 1
        assert ended.stdout == ""
        assert "NothingToRestore" in ended.stderr
        for part in ("found", "expected", "next"):
            assert part in ended.stderr
    assert recpoint("list", tmp_path, "--json").json["error"] == "NothingToRestore"


@pytest.mark.parametrize(
    "url", ["", "s3://", "s3://key:secret@bucket/run", "gopher://host/run", "s3://bucket/../x"]
)
def test_a_url_that_cannot_work_is_a_usage_error(recpoint: Invoke, url: str) -> None:
    ended = recpoint("list", url, "--json")
    assert ended.code == 2
    assert ended.json["error"] == "SettingsError"
    assert "secret" not in ended.stdout + ended.stderr


# --- show --------------------------------------------------------------------------------------


def test_show_tells_tables_chunks_and_chain(recpoint: Invoke, saved_run: SavedRun) -> None:
    document = recpoint("show", saved_run.directory, "30", "--json").json
    manifest = saved_run.manifests[30]
    assert [member["step"] for member in document["chain"]] == [10, 20, 30]
    assert [table["name"] for table in document["tables"]] == ["items", "users"]
    assert [chunk["key"] for chunk in document["chunks"]] == [c.key for c in manifest.chunks]
    shown = recpoint("show", saved_run.directory, "30", "--chunks").stdout
    assert "items" in shown and "increment, 3 in its chain; a restore reads 3" in shown
    # Keys are longer than the terminal: they are folded, never cut.
    squeezed = re.sub(r"\s", "", shown)
    assert all(f"{chunk.crc32c:08x}" in shown for chunk in manifest.chunks)
    assert manifest.attempt[:8] in squeezed


def test_show_finds_superseded_checkpoints_only_by_generation(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    ended = recpoint("show", saved_run.directory, "25")
    assert ended.code == 1
    assert "--generation" in ended.stderr
    document = recpoint("show", saved_run.directory, "25", "--generation", "1", "--json").json
    assert document["attempt"] == saved_run.superseded.attempt
    assert recpoint("show", saved_run.directory, "26").code == 1
    assert recpoint("show", saved_run.directory, "26", "--generation", "1").code == 1


def test_show_says_that_a_chain_is_broken(recpoint: Invoke, saved_run: SavedRun) -> None:
    (saved_run.directory / MANIFEST_KEY.of(10, 1)).unlink()
    ended = recpoint("show", saved_run.directory, "30", "--json")
    found = ended.json
    assert ended.code == 1 and recpoint("show", saved_run.directory, "30").code == 1
    assert (found["chain"], found["error"]) == (None, "MissingLink")
    assert f"recpoint list {saved_run.directory}" in found["message"]
    assert "MissingLink" in recpoint("show", saved_run.directory, "30").stdout


def test_names_from_a_manifest_cannot_speak_to_the_terminal(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    hostile = "[bold red]x[/]\x1b[2J\x1b]0;title\x07\r\n\u202egnp.exe\x9b31m"
    spec = saved_run.manifests[10].tables[0].model_copy(update={"name": hostile})
    manifest = saved_run.manifests[10].model_copy(
        update={
            "writer": hostile[:200],
            "tables": (spec, *saved_run.manifests[10].tables[1:]),
        }
    )
    (saved_run.directory / MANIFEST_KEY.of(10, 1)).write_bytes(pack_record(manifest))
    for options in ([], ["--chunks"], ["--json"]):
        ended = recpoint("show", saved_run.directory, "10", *options)
        assert ended.code == 0
        assert all(c.isprintable() or c == "\n" for c in ended.stdout)
    shown = re.sub(r"\s", "", recpoint("show", saved_run.directory, "10").stdout)
    assert "[boldred]" in shown and r"\x1b[2J" in shown and r"\u202e" in shown


# --- check -------------------------------------------------------------------------------------


def test_check_of_a_good_run(recpoint: Invoke, saved_run: SavedRun) -> None:
    for level in ("metadata", "full"):
        document = recpoint("check", saved_run.directory, "--level", level, "--json").json
        assert document["ok"] is True
        assert all(entry["restorable"] for entry in document["checkpoints"])
        assert (document["bytes_read"] > 0) == (level == "full")
    assert recpoint("check", saved_run.directory).stdout.startswith("Findings")
    assert recpoint("check", saved_run.directory, "--step", "20").code == 0
    assert recpoint("check", saved_run.directory, "--step", "21").code == 1


def test_check_of_a_flipped_bit(recpoint: Invoke, saved_run: SavedRun) -> None:
    key = saved_run.manifests[20].chunks[0].key
    damage(saved_run.directory / key)
    assert recpoint("check", saved_run.directory).code == 0  # only bytes can tell
    ended = recpoint("check", saved_run.directory, "--level", "full", "--json")
    assert ended.code == 1
    assert ended.json["ok"] is False
    assert key in {finding["key"] for finding in ended.json["findings"]}
    restorable = {entry["step"]: entry["restorable"] for entry in ended.json["checkpoints"]}
    assert restorable == {30: False, 25: False, 20: False, 10: True}
    text = recpoint("check", saved_run.directory, "--level", "full").stdout
    assert "damaged: 1 of 3 live checkpoints restore" in re.sub(r"\s+", " ", text)


def test_check_of_a_missing_chunk(recpoint: Invoke, saved_run: SavedRun) -> None:
    (saved_run.directory / saved_run.manifests[30].chunks[0].key).unlink()
    assert recpoint("check", saved_run.directory, "--json").code == 1


def test_check_refuses_an_unknown_level(recpoint: Invoke, saved_run: SavedRun) -> None:
    assert recpoint("check", saved_run.directory, "--level", "deep").code == 2
    assert recpoint("check").code == 2


# --- sweep -------------------------------------------------------------------------------------


def make_old(directory: Path) -> None:
    for path in directory.rglob("*"):
        os.utime(path, (1, 1))


def test_sweep_removes_orphans_and_nothing_else(recpoint: Invoke, saved_run: SavedRun) -> None:
    orphan = build(saved_run.run, tables(), step=40, generation=2)
    upload(saved_run.run.store, orphan)
    half = saved_run.directory / "chunks" / f".tmp-{'0' * 32}"
    half.write_bytes(b"half")
    foreign = saved_run.directory / "notes.txt"
    foreign.write_text("mine")

    young = recpoint("sweep", saved_run.directory, "--json").json
    assert young["planned"] == young["removed"] == []
    assert len(young["kept"]) == 1

    make_old(saved_run.directory)
    # No host is known to serve the run: its newest trainer may have staged it on another one.
    elsewhere = recpoint("sweep", saved_run.directory, "--dry-run", "--json").json
    assert [swept["key"] for swept in elsewhere["planned"]] == [f"chunks/{half.name}"]
    assert [kept["reason"] for kept in elsewhere["kept"]] == ["its trainer may still commit it"]
    all_of_it = ("sweep", saved_run.directory, "--include-newest")
    before = {path for path in saved_run.directory.rglob("*") if path.is_file()}
    planned = recpoint(*all_of_it, "--dry-run", "--json").json
    assert {path for path in saved_run.directory.rglob("*") if path.is_file()} == before
    keys = {swept["key"] for swept in planned["planned"]}
    assert set(orphan.chunks) < keys and len(keys) == len(orphan.chunks) + 1
    assert planned["dry_run"] is True and planned["removed"] == []
    assert planned["unrecognised"] == ["notes.txt"]

    ended = recpoint(*all_of_it, "--grace", "1h")
    assert ended.code == 0
    assert f"removed {len(keys)} objects" in ended.stdout
    after = {path for path in saved_run.directory.rglob("*") if path.is_file()}
    assert before - after == {saved_run.directory / key for key in orphan.chunks} | {half}
    assert recpoint("check", saved_run.directory, "--level", "full").code == 0


@pytest.mark.parametrize("grace", ["", "-1", "1w", "h", "1e3", "nan", "1h2m"])
def test_sweep_refuses_a_grace_that_is_none(
    recpoint: Invoke, saved_run: SavedRun, grace: str
) -> None:
    assert recpoint("sweep", saved_run.directory, f"--grace={grace}").code == 2


def test_sweep_refuses_a_grace_in_which_checkpoints_are_still_written(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    ended = recpoint("sweep", saved_run.directory, "--grace", "59m", "--json")
    assert ended.code == 2 and ended.json["subject"] == "grace_seconds"
    assert "at least 3600" in ended.json["expected"]


def test_sweep_leaves_all_chunks_while_a_manifest_cannot_be_read(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    orphan = build(saved_run.run, tables(), step=40, generation=2)
    upload(saved_run.run.store, orphan)
    damage(saved_run.directory / MANIFEST_KEY.of(25, 1))
    make_old(saved_run.directory)
    document = recpoint("sweep", saved_run.directory, "--json").json
    assert document["blocked"] == [MANIFEST_KEY.of(25, 1)]
    assert document["removed"] == []


# --- all of them -------------------------------------------------------------------------------


def test_info_names_versions_and_kernels(recpoint: Invoke) -> None:
    document = recpoint("info", "--json").json
    assert document["format"] == 1
    assert document["packages"]["torch"].startswith("2.")
    assert document["cpu_threads"] == torch.get_num_threads()
    assert document["huge_pages"] in ("always", "madvise", "never", "none")
    runs = {(kernel["kernel"], kernel["device"]): kernel for kernel in document["kernels"]}
    assert {device for _, device in runs} == {"cpu", "cuda"}
    quantize = runs["quantize", "cpu"]
    assert quantize["name"] == "native" and document["instruction_set"] in quantize["why"]
    on_gpu = runs["quantize", "cuda"]
    if document["cuda_devices"]:
        assert on_gpu["name"] == "triton" and document["cuda_devices"][0] in on_gpu["why"]
    else:
        assert (on_gpu["name"], on_gpu["why"]) == (None, "no CUDA device")
    shown = recpoint("info").stdout
    assert all(kernel in shown for kernel, _ in runs) and document["staging"] in shown


def test_show_tells_how_tables_were_quantized(recpoint: Invoke, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    made = build(run, tables(bits=4), step=10, generation=1)
    quantizer = Quantizer(
        table=0,
        rank=0,
        method="greedy",
        bins=25,
        ratio_permille=400,
        refits=0,
        sample_rows=4096,
        seed=10,
    )
    by = {"quantizers": (quantizer,), "quantized_by": "native, 2 threads"}
    publish(run, replace(made, manifest=made.manifest.model_copy(update=by)))
    document = recpoint("show", tmp_path / "run", "10", "--json").json
    assert document["quantizers"] == [quantizer.model_dump()]
    assert document["quantized_by"] == "native, 2 threads"
    shown = " ".join(recpoint("show", tmp_path / "run", "10").stdout.split())
    assert "quantized by native, 2 threads" in shown
    assert quantizer_text(quantizer) == "greedy, bins 25, ratio 0.4 (chosen on 4,096 rows)"


def test_show_says_what_rounding_costs_in_loss(recpoint: Invoke, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    built = build(run, tables(bits=8), step=10, generation=1)
    loss = MeasuredLoss(
        increase=(1e-4).hex(),
        price=None,
        low=(1e-6).hex(),
        high=(5e-5).hex(),
        predicted=None,
        batches=60,
    )
    publish(run, replace(built, manifest=built.manifest.model_copy(update={"loss": loss})))
    assert recpoint("show", run.url, "10", "--json").json["loss"]["high"] == 5e-5
    assert (
        "cost of rounding Rounding all rows to 8 bits costs 0.0001% to 0.005% of the loss (95% "
        "confidence, 60 measured batches); 0.01% is allowed."
    ) in flat(recpoint("show", run.url, "10").stdout)


def test_show_says_how_many_rows_of_a_table_have_which_width(
    recpoint: Invoke, tmp_path: Path
) -> None:
    mixed = Path(__file__).parents[2] / "golden" / "mixed" / "run"
    shown = flat(recpoint("show", shutil.copytree(mixed, tmp_path / "run"), "100").stdout)
    assert (
        "widths items: 12.17 bits a value (of the rows, 2.2% in 2, 26.7% in 3, 4.4% in 4, "
        "1.1% in 5, 14.4% in 6, 25.6% in 8, 25.6% exact)"
    ) in shown
    assert "12.17 bit on average" in shown


def test_json_is_one_line_whatever_happens(recpoint: Invoke, saved_run: SavedRun) -> None:
    publish(saved_run.run, build(saved_run.run, tables(), step=50, generation=2))
    for arguments in (
        ("list", saved_run.directory),
        ("show", saved_run.directory, "50"),
        ("check", saved_run.directory),
        ("sweep", saved_run.directory),
        ("show", saved_run.directory, "51"),
        ("info",),
    ):
        stdout = recpoint(*arguments, "--json").stdout
        assert stdout.endswith("}\n") and stdout.count("\n") == 1
        assert isinstance(json.loads(stdout), dict)


def test_show_tells_how_the_width_was_chosen(recpoint: Invoke, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    generation = run.claim(None).generation
    reason = "8.5 restores expected: 2 from quantized rows so far \x1b[2J"
    precision = ChosenPrecision(bits=4, expected_milli=8500, fallen_back=False, reason=reason)
    history = History(trained_ms=5_400_000, lossy_restores=2, precision=precision)
    for step, given in ((10, history), (20, UNTRAINED)):
        trained = tables(seed=1)
        publish(run, build(run, trained, step=step, generation=generation, history=given))
    document = recpoint("show", run.url, "10", "--json").json
    assert document["history"] == history.model_dump()
    shown = " ".join(recpoint("show", run.url, "10").stdout.split())
    assert "trained 1.5 h, 2 restores from quantized rows" in shown
    assert 'precision 4 bits where bits="auto": 8.5 restores expected: 2 from' in shown
    assert "\x1b" not in shown and r"\x1b[2J" in shown
    plain = recpoint("show", run.url, "20")
    assert "trained" in plain.stdout and "auto" not in plain.stdout
