"""What is known from validations, and what a restore makes of it (format §10)."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recpoint.catalog.restore.order import Selection, Skipped, skipped_text
from recpoint.catalog.restore.restore import MemoryTarget, RestoreReport, restore
from recpoint.catalog.run.facts import gather
from recpoint.catalog.run.representations import Representations
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts, add_record, records_of, verdict, verdicts
from recpoint.errors import ForeignObject, NothingToRestore, SettingsError, StoreUnavailable
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    MAX_VALIDATION,
    VALIDATION_KEY,
    ManifestName,
    ValidationLevel,
    ValidationName,
    ValidationResult,
)
from recpoint.format.record_kinds import VALIDATION
from recpoint.format.records import pack_record
from recpoint.format.validation import ValidationFinding, ValidationRecord
from recpoint.testing.faults import Fault, FaultStore
from tests.catalog_builder import build, copy_run, new_run, publish, tables

DIRTY = [torch.tensor([1, 4, 7, 9]), torch.tensor([0, 3])]
FINDING = ValidationFinding(
    subject="items", row=1, what="values[0]", found="1", expected="2", bound="0.5"
)
RESULTS: dict[str, ValidationResult] = {"p": "passed", "f": "failed", "s": "stateless"}
LEVELS: dict[str, ValidationLevel] = {"m": "metadata", "s": "sample", "f": "full"}


def names(history: str) -> list[ValidationName]:
    """For instance "sp ff": a sample that passed, then a full validation that failed."""
    return [
        ValidationName(10, 1, number, LEVELS[said[0]], RESULTS[said[1]])
        for number, said in enumerate(history.split(), 1)
    ]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("mp", "metadata"),
        ("mp sp fp", "full"),
        ("fp sp mp", "full"),
        ("ff", "failed (full)"),
        ("ff fp", "full"),
        ("ff sp", "failed (full)"),
        ("sf fp", "full"),
        ("mf fp", "full"),
        ("mf mp", "metadata"),
        ("ff mf fp", "full"),
        ("ff mf mp", "failed (full)"),
        ("fp mf", "failed (metadata)"),
        ("fp mf mp", "metadata"),
        ("fp ss", "stateless (sample)"),
        ("ss sp", "sample"),
        ("ff fs", "failed (full)"),
        ("fs sf", "failed (sample)"),
        ("ff fs sp", "failed (full)"),
        ("sf fs sp", "stateless (full)"),
        ("ff ss mp sp", "failed (full)"),
        ("ff fs fp", "full"),
        ("sf fs mf sp mp", "stateless (full)"),
    ],
)
def test_a_failure_stands_until_no_less_has_passed(history: str, expected: str) -> None:
    assert str(verdict(names(history))) == expected


def test_of_two_at_the_same_time_the_worse_counts() -> None:
    both = [
        ValidationName(10, 1, 3, "full", "failed"),
        ValidationName(10, 1, 3, "full", "passed"),
    ]
    assert verdict(both).result == verdict(reversed(both)).result == "failed"
    both[1] = ValidationName(10, 1, 3, "full", "stateless")
    assert verdict(both).result == verdict(reversed(both)).result == "failed"


@pytest.mark.parametrize("name", names("mp sf fs"))
def test_keys_say_what_they_were_built_from(name: ValidationName) -> None:
    key = VALIDATION_KEY.of(*name)
    assert VALIDATION_KEY.parse(key) == name
    for other in (key + "\n", key[1:], key.replace("-00000001-", "-00000000-"), "validations/x"):
        assert VALIDATION_KEY.parse(other) is None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Manifest]]:
    """Full 10, increments 11 and 12, full 20, increment 21."""
    run = new_run(tmp_path_factory.mktemp("built") / "run")
    run.claim(None)
    made: list[Manifest] = []
    for step in (10, 11, 12, 20, 21):
        parent = None if step in (10, 20) else made[-1]
        dirty = DIRTY if parent else None
        checkpoint = build(
            run, tables(seed=step), step=step, generation=1, parent=parent, dirty=dirty
        )
        made.append(publish(run, checkpoint))
    return run, made


@pytest.fixture
def run(built: tuple[Run, list[Manifest]], tmp_path: Path) -> Run:
    return copy_run(built[0], tmp_path / "run")


_times = count(1)


def say(run: Run, step: int, level: ValidationLevel, result: ValidationResult) -> ValidationName:
    """Record that a validation came to this."""
    now = next(_times)
    record = ValidationRecord(
        run=run.id,
        checkpoint=run.manifest(step, 1).ref,
        level=level,
        result=result,
        links_read=1,
        chunks_read=1,
        bytes_read=1,
        rows_compared=1,
        worst_ppm=1,
        digests=(),
        findings=() if result == "passed" else (FINDING,),
        more_findings=0,
        evaluated_by="",
        started_ms=now,
        finished_ms=now,
        writer="recpoint tests",
    )
    return add_record(run, record)


def remove(run: Run, manifest: Manifest) -> None:
    """Delete a chunk that it alone names."""
    run.store.delete(manifest.chunks[0].key)


def restored(run: Run, *, validated_only: bool = False) -> RestoreReport:
    return restore(run, MemoryTarget(), Selection(validated_only=validated_only))


def test_without_validations_the_newest_is_restored(run: Run) -> None:
    report = restored(run)
    assert report.restored.step == 21 and report.skipped == ()


def test_a_newer_one_that_was_never_validated_is_restored_and_the_report_says_so(run: Run) -> None:
    """Going back to the validated one would lose committed training."""
    say(run, 20, "full", "passed")
    report = restored(run)
    assert (report.restored.step, report.validation) == (21, None)
    say(run, 21, "metadata", "passed")
    known = restored(run).validation
    assert known is not None and known.in_words == "validated (metadata)"
    say(run, 21, "sample", "passed")
    known = restored(run).validation
    assert known is not None and known.in_words == "validated (sample)"
    say(run, 21, "sample", "failed")
    known = restore(run, MemoryTarget(), Selection(step=21)).validation
    assert known is not None and known.in_words == "validation 3 found wrong or damaged rows"
    report = restored(run)
    assert report.restored.step == 20 and report.validation == ("passed", "full", 1)
    assert [skipped.name.step for skipped in report.skipped] == [21]


@pytest.mark.parametrize("result", ["failed", "stateless"])
def test_one_that_failed_is_passed_over_with_its_reason(run: Run, result: ValidationResult) -> None:
    say(run, 21, "sample", result)
    report = restored(run)
    assert report.restored.step == 20
    (skipped,) = report.skipped
    assert skipped.name == (21, 1) and skipped.error.startswith("validation 1 found ")
    assert "if its step is named" in skipped.error
    assert restore(run, MemoryTarget(), Selection(step=21)).restored.step == 21
    say(run, 21, "sample", "passed")
    assert restored(run).restored.step == 21


def test_one_that_needs_one_that_failed_is_passed_over(run: Run) -> None:
    say(run, 20, "sample", "failed")
    report = restored(run)
    assert report.restored.step == 12
    assert [skipped.name.step for skipped in report.skipped] == [21, 20]
    assert "of step 20 (generation 1), which it needs" in report.skipped[0].error
    say(run, 21, "full", "passed")
    assert restored(run).restored.step == 21, "its whole chain was looked at, and was good"


def test_state_that_is_damaged_is_nobody_elses(run: Run) -> None:
    say(run, 20, "sample", "stateless")
    assert restored(run).restored.step == 21


def test_state_that_is_damaged_too_makes_no_wrong_row_right(run: Run) -> None:
    """Nor for whoever stands on it: restores, consolidations and retention go by the same."""
    say(run, 20, "full", "failed")
    say(run, 20, "full", "stateless")
    assert restored(run).restored.step == 12
    doubts = Doubts(run, validated_only=False)
    assert "1 of step 20 (generation 1), which it needs" in str(doubts.about(ManifestName(21, 1)))
    facts = gather(run)
    there = Representations(facts.manifests, facts.verdicts)
    assert there.is_doubted(ManifestName(21, 1)) and not there.is_trusted(ManifestName(20, 1))
    say(run, 20, "full", "passed")
    assert restored(run).restored.step == 21


def test_only_validated_ones_when_that_is_asked_for(run: Run) -> None:
    with pytest.raises(NothingToRestore, match="not validated"):
        restored(run, validated_only=True)
    say(run, 20, "metadata", "passed")
    say(run, 12, "sample", "passed")
    report = restored(run, validated_only=True)
    assert report.restored.step == 12
    assert [skipped.error.partition(";")[0] for skipped in report.skipped] == [
        "not validated",
        "not validated beyond its metadata",
    ]
    say(run, 20, "full", "passed")
    assert restored(run, validated_only=True).restored.step == 20


class TestValidatedWithin:
    """How many batches may be trained once more for a checkpoint that was validated."""

    def test_the_newest_validated_one_goes_first_if_it_is_near(self, run: Run) -> None:
        say(run, 20, "metadata", "passed")
        say(run, 12, "sample", "passed")
        say(run, 10, "full", "passed")
        for within, expected in ((None, 21), (0, 21), (8, 21), (9, 12), (100, 12)):
            report = restore(run, MemoryTarget(), Selection(validated_within=within))
            assert report.restored.step == expected, within
        assert [skipped.name.step for skipped in report.skipped] == [21, 20]
        assert {skipped.error for skipped in report.skipped} == {
            "not validated; step 12 (generation 1) is, within 100 batches of the newest"
        }
        assert report.validation is not None and report.validation.passed("sample")
        nine: Any = np.int64(9)
        assert restore(run, MemoryTarget(), Selection(validated_within=nine)).restored.step == 12
        say(run, 21, "sample", "passed")
        report = restore(run, MemoryTarget(), Selection(validated_within=100))
        assert (report.restored.step, report.skipped) == (21, ())

    def test_with_nothing_validated_or_a_step_it_changes_nothing(self, run: Run) -> None:
        assert restore(run, MemoryTarget(), Selection(validated_within=100)).restored.step == 21
        say(run, 12, "sample", "passed")
        assert (
            restore(run, MemoryTarget(), Selection(step=20, validated_within=100)).restored.step
            == 20
        )

    def test_the_same_holds_among_what_damage_leaves(
        self, run: Run, built: tuple[Run, list[Manifest]]
    ) -> None:
        say(run, 12, "sample", "passed")
        say(run, 10, "sample", "passed")
        remove(run, built[1][4])  # 21: 12 is near to 20, and was too far from 21
        report = restore(run, MemoryTarget(), Selection(validated_within=8))
        assert report.restored.step == 12
        errors = {skipped.name.step: skipped.error for skipped in report.skipped}
        assert "ObjectNotFound" in errors[21] and errors[20].startswith("not validated; step 12")
        remove(run, built[1][2])  # 12 as well: 10 is too far from 20
        report = restore(run, MemoryTarget(), Selection(validated_within=8))
        assert report.restored.step == 20
        assert "ObjectNotFound" in report.skipped[0].error
        report = restore(run, MemoryTarget(), Selection(validated_within=10))
        assert report.restored.step == 10
        assert [skipped.name.step for skipped in report.skipped] == [21, 20, 12, 11]
        found = {ManifestName(20, 1): "as the caller found"}
        report = restore(run, MemoryTarget(), Selection(validated_within=1), damaged=found)
        assert report.restored.step == 10
        assert report.skipped[1].error == "as the caller found"

    def test_what_failed_is_no_newest_to_count_from(self, run: Run) -> None:
        say(run, 12, "sample", "passed")
        say(run, 20, "sample", "failed")  # and with it 21
        report = restore(run, MemoryTarget(), Selection(validated_within=0))
        assert report.restored.step == 12
        assert all("validation 1" in skipped.error for skipped in report.skipped)
        say(run, 21, "full", "passed")
        say(run, 21, "full", "stateless")
        say(run, 21, "full", "passed")
        assert restore(run, MemoryTarget(), Selection(validated_within=9)).restored.step == 21

    @pytest.mark.parametrize("wrong", [-1, 1.5, True, "9"])
    def test_what_is_no_number_of_batches_is_refused(self, run: Run, wrong: Any) -> None:
        with pytest.raises(SettingsError, match="validated_within"):
            restore(run, MemoryTarget(), Selection(validated_within=wrong))


def test_reasons_that_are_equal_are_told_once_and_the_next_step_helps(run: Run) -> None:
    with pytest.raises(NothingToRestore) as unvalidated:
        restored(run, validated_only=True)
    error = unvalidated.value
    assert error.found.startswith("5 checkpoints, steps 10 … 21: not validated")
    assert error.found.count("not validated") == 1
    assert error.next_step == f"recpoint validate {run.url}"
    for name in run.live_line():
        say(run, name.step, "sample", "stateless")
    with pytest.raises(NothingToRestore) as failed:
        restored(run)
    assert failed.value.found.startswith("5 checkpoints, steps 10 … 21: validation 1 found its")
    assert failed.value.next_step.startswith(f"recpoint validate {run.url} --step 21 ")


def test_a_line_of_much_damage_is_told_in_a_few_words() -> None:
    name = ManifestName
    skipped = [Skipped(name(step, 1), f"chunk {step} " + "is gone " * 200) for step in range(50)]
    assert len(skipped_text(skipped)) < 3000
    assert skipped_text(skipped).endswith("; 44 more, for other reasons")


def test_all_failed_is_nothing_to_restore(run: Run) -> None:
    for step in (10, 20):
        say(run, step, "full", "failed")
    with pytest.raises(NothingToRestore, match="validation 1 found wrong or damaged rows"):
        restored(run)


def test_damage_is_still_found_by_reading(run: Run, built: tuple[Run, list[Manifest]]) -> None:
    say(run, 21, "full", "passed")
    run.store.delete(built[1][4].chunks[0].key)
    report = restored(run)
    assert report.restored.step == 20 and "ObjectNotFound" in report.skipped[0].error


# --- records -------------------------------------------------------------------------------------


def test_an_answer_that_got_lost_makes_no_second_record(run: Run) -> None:
    store = FaultStore(run.store, [Fault.lost_reply(key_contains="validations/")])
    first = say(Run.open(store), 21, "full", "passed")
    assert records_of(run, ManifestName(21, 1)) == [first]
    assert say(run, 21, "full", "passed").number == 2


def test_a_store_that_cannot_be_written_keeps_nothing(run: Run) -> None:
    with pytest.raises(StoreUnavailable):
        say(Run.open(FaultStore(run.store, [Fault.stop_after(0)])), 21, "full", "failed")
    assert verdicts(run) == {} and restored(run).restored.step == 21


def test_numbers_that_have_run_out_are_said_with_what_to_do(run: Run) -> None:
    last = ValidationName(21, 1, MAX_VALIDATION, "full", "passed")
    run.store.put(VALIDATION_KEY.of(*last), b"{}")
    with pytest.raises(ForeignObject, match="the highest number that there is") as full:
        say(run, 21, "sample", "passed")
    assert full.value.subject.endswith(VALIDATION_KEY.of(*last))
    assert f"{run.url}/{VALIDATION_KEY.of(*last)}" in full.value.next_step
    assert records_of(run, ManifestName(21, 1)) == [last]
    run.store.delete(VALIDATION_KEY.of(*last))
    assert say(run, 21, "sample", "passed").number == 1


def test_a_record_under_anothers_key_is_refused(run: Run) -> None:
    name = say(run, 21, "full", "failed")
    record = run.records(VALIDATION).read(*name)
    other = name._replace(step=20)
    run.store.put(VALIDATION_KEY.of(*other), pack_record(record))
    with pytest.raises(ForeignObject):
        run.records(VALIDATION).read(*other)
