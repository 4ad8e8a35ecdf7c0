"""What each rule keeps, what a kept chain needs, and what is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from recpoint.catalog.retention.keep import RetentionPlan, needed_manifests, plan
from recpoint.catalog.retention.rules import BestBy, RetentionPolicy
from recpoint.catalog.run.representations import RunFacts, StoredManifest
from recpoint.errors import RetentionRefused, SettingsError
from recpoint.format.naming import ManifestName
from tests.retention_facts import HOUR_MS, NOW_MS, facts, full, increment, merged

LAST = RetentionPolicy(keep_last=1, require_validated=False)


def chain(*steps: int, generation: int = 1) -> list[StoredManifest]:
    """A full and increments on each other."""
    made = [full(steps[0], generation=generation)]
    for step in steps[1:]:
        made.append(increment(step, made[-1], generation=generation))
    return made


def kept_keys(made: RetentionPlan) -> set[str]:
    return {decision.manifest.key for decision in made.decisions if decision.action == "keep"}


def kept_steps(made: RetentionPlan) -> list[int]:
    """Steps that rules keep, ascending; what only a chain needs is not among them."""
    return sorted(name.step for name in made.kept)


def fulls(hours: list[float]) -> RunFacts:
    """Fulls at steps 1, 2, …, taken so many hours ago."""
    return facts(full(step, hours_ago=ago) for step, ago in enumerate(hours, start=1))


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (dict(keep_last=2), [7, 8]),
        (dict(keep_within_seconds=3600), [7, 8]),
        (dict(keep_within_seconds=7200), [6, 7, 8]),
        (dict(keep_hourly=2), [6, 8]),
        (dict(keep_daily=2), [4, 8]),
        (dict(keep_daily=10), [1, 2, 3, 4, 8]),
        (dict(keep_weekly=2), [3, 8]),
        (dict(keep_monthly=1), [8]),
        (dict(keep_monthly=9), [1, 8]),
        (dict(keep_last=2, keep_daily=2), [4, 7, 8]),
    ],
)
def test_what_a_rule_keeps(policy: dict[str, Any], steps: list[int]) -> None:
    # NOW_MS is a Thursday at 12:00 in the middle of a month; step 3 lies on the Sunday before.
    made = plan(
        fulls([720, 110, 90, 20, 4, 2, 0.9, 0.5]),
        RetentionPolicy(**policy, require_validated=False),
    )
    assert kept_steps(made) == steps


def test_the_best_by_a_metric_and_the_newest_of_equals() -> None:
    there = fulls([5, 4, 3, 2, 1])
    auc = {ManifestName(step, 1): value for step, value in ((1, 0.9), (2, 0.7), (3, 0.9), (4, 0.1))}
    there = replace(there, metrics={"auc": auc})
    best = RetentionPolicy(best_by=(BestBy("auc", "max"),), require_validated=False)
    assert kept_steps(plan(there, best)) == [3, 5]  # 5 is the newest
    assert "best by max auc (0.9)" in plan(there, best).kept[ManifestName(3, 1)]
    both = RetentionPolicy(
        best_by=(BestBy("auc", "max", 2), BestBy("auc", "min")), require_validated=False
    )
    assert kept_steps(plan(there, both)) == [1, 3, 4, 5]


def test_a_kept_increment_keeps_its_whole_chain_and_no_more() -> None:
    old, new = chain(1, 2, 3), chain(10, 11, 12, 13)
    made = plan(facts([*old, *new]), RetentionPolicy(keep_last=2, require_validated=False))
    assert kept_keys(made) == {manifest.key for manifest in new}
    reasons = {decision.manifest.name.step: decision.reason for decision in made.decisions}
    assert "one of the last 2" in reasons[12] and "newest" in reasons[13]
    assert "needs it" in reasons[11] and "needs it" in reasons[10]
    assert reasons[3] == "no rule keeps it, no kept chain needs it"
    assert [decision.manifest.name.step for decision in made.dropped] == [3, 2, 1]
    assert made.dropped_bytes == 120


def test_pins_and_leases_keep_and_superseded_checkpoints_go() -> None:
    old, other = chain(1, 2, 3), chain(4, 5, generation=2)
    there = facts([*old, *other], live=[manifest.name for manifest in other])
    made = plan(there, LAST)
    assert kept_keys(made) == {manifest.key for manifest in other}
    assert {decision.reason for decision in made.dropped} == {"superseded, and no rule keeps it"}
    pinned = replace(there, pins={old[1].name: ["release", "best"]})
    made = plan(pinned, LAST)
    assert kept_keys(made) == {manifest.key for manifest in [*old[:2], *other]}
    assert made.kept[old[1].name] == "pinned (best, release)"
    leased = replace(there, leased={old[0].name: "publish of host 7"})
    assert kept_keys(plan(leased, LAST)) == {manifest.key for manifest in [old[0], *other]}


def test_keep_within_keeps_superseded_checkpoints_too() -> None:
    old, other = full(1, hours_ago=2), full(2, generation=2)
    there = facts([old, other], live=[other.name])
    policy = RetentionPolicy(keep_within_seconds=3 * 3600, require_validated=False)
    assert plan(there, policy).dropped == ()


def test_the_newest_that_restores_is_kept_though_no_rule_keeps_it() -> None:
    best, trusted, damaged = full(1), full(2), full(3)
    run = replace(
        facts([best, trusted, damaged]),
        metrics={"auc": {best.name: 0.9, trusted.name: 0.1}},
        verdicts={damaged.name: "failed"},
    )
    made = plan(run, RetentionPolicy(best_by=(BestBy("auc", "max"),), require_validated=False))
    assert made.kept[trusted.name] == "newest that restores"
    assert needed_manifests(run, frozenset({trusted.key})) == {trusted.key: "newest that restores"}


class TestRepresentations:
    """A checkpoint that was consolidated has a shorter way to it."""

    def test_a_merged_full_lets_the_old_chain_go_when_it_is_not_the_newest(self) -> None:
        first, second, third, fourth = chain(1, 2, 3, 4)
        short = merged(third)
        made = plan(
            facts([first, second, third, fourth, short]),
            RetentionPolicy(keep_last=2, require_validated=False),
        )
        # Of the newest, 4, all forms are needed, and a reader comes to 3 by the merged full.
        assert kept_keys(made) == {fourth.key, short.key}
        why = {decision.manifest.key: decision.reason for decision in made.dropped}
        assert why[third.key] == f"{short.key} restores the same checkpoint"

    def test_the_newest_is_kept_in_all_forms(self) -> None:
        first, second, third = chain(1, 2, 3)
        made = plan(facts([first, second, third, merged(third)]), LAST)
        assert made.dropped == ()  # a staged increment may name the old chain

    def test_an_older_kept_checkpoint_holds_the_old_chain(self) -> None:
        first, second, third, fourth = chain(1, 2, 3, 4)
        short = merged(third)
        there = facts([first, second, third, fourth, short])
        pinned = replace(there, pins={second.name: ["pin"]})
        assert kept_keys(plan(pinned, LAST)) == {first.key, second.key, fourth.key, short.key}

    def test_a_partial_merge_skips_the_links_between(self) -> None:
        first, second, third, fourth, fifth = chain(1, 2, 3, 4, 5)
        short = merged(fourth, after=first)
        made = plan(facts([first, second, third, fourth, fifth, short]), LAST)
        assert kept_keys(made) == {first.key, short.key, fifth.key}

    def test_a_merged_full_with_chunks_missing_counts_for_nothing(self) -> None:
        first, second, third, fourth = chain(1, 2, 3, 4)
        short = merged(third)._replace(whole=False)
        made = plan(facts([first, second, third, fourth, short]), LAST)
        assert kept_keys(made) == {first.key, second.key, third.key, fourth.key}

    def test_a_leased_checkpoint_is_kept_in_all_forms(self) -> None:
        first, second, third, fourth = chain(1, 2, 3, 4)
        there = facts([first, second, third, fourth, merged(third)])
        leased = replace(there, leased={third.name: "restore"})
        assert plan(leased, LAST).dropped == ()


class TestDamage:
    """Damage uses up no rule, and what may be repaired is not dropped before its time."""

    def test_damaged_checkpoints_do_not_count_and_are_kept_as_if_they_did(self) -> None:
        good, bad = [full(1), full(2)], [full(3, whole=False), full(4, whole=False)]
        made = plan(facts([*good, *bad]), RetentionPolicy(keep_last=2, require_validated=False))
        assert made.dropped == ()
        made = plan(facts([*good, *bad]), LAST)
        assert kept_steps(made) == [2, 4]

    def test_a_link_without_its_state_still_leads_to_what_stands_on_it(self) -> None:
        first, second, third, fourth = chain(1, 2, 3, 4)
        second = second._replace(state_whole=False)
        made = plan(facts([full(0), first, second, third, fourth]), LAST)
        assert kept_steps(made) == [4] and [d.manifest.name.step for d in made.dropped] == [0]
        # Of the two forms of a link, the one that restores it leads on too.
        short = merged(third)._replace(state_whole=False)
        made = plan(facts([first, second, third, fourth, short]), LAST)
        assert [d.manifest for d in made.dropped] == [short]
        bare = fourth._replace(state_whole=False)
        made = plan(facts([first, second, third, bare]), LAST)
        assert kept_steps(made) == [3, 4]

    def test_a_link_of_another_attempt_is_no_link(self) -> None:
        first, second, third = chain(1, 2, 3)
        third = third._replace(parent_attempt="f" * 32)
        made = plan(facts([first, second, third]), LAST)
        # 3 does not restore: 2 is what can be gone back to, and 3 is still the newest.
        assert kept_steps(made) == [2, 3] and made.dropped == ()

    def test_a_missing_parent_breaks_everything_after_it(self) -> None:
        first, second, third = chain(1, 2, 3)
        other = full(0)
        made = plan(facts([other, first, third]), LAST)
        assert kept_steps(made) == [1, 3] and [d.manifest for d in made.dropped] == [other]

    def test_what_a_validation_found_broken_does_not_count(self) -> None:
        first, second, third = chain(1, 2, 3)
        there = facts([full(0), first, second, third, full(4), full(5)])
        broken = replace(there, verdicts={second.name: "failed", ManifestName(5, 1): "stateless"})
        # 3 goes through 2; 4 and 1 are the newest two that a reader would take unasked.
        assert kept_steps(plan(broken, RetentionPolicy(keep_last=2, require_validated=False))) == [
            1,
            4,
            5,
        ]
        proven = replace(broken, verdicts={**broken.verdicts, third.name: "full"})
        assert kept_steps(plan(proven, RetentionPolicy(keep_last=2, require_validated=False))) == [
            3,
            4,
            5,
        ]

    def test_merged_rows_of_a_failed_link_do_not_count_as_good(self) -> None:
        good, bad = full(1), full(2)
        third = increment(3, bad)
        fourth = increment(4, third)
        there = facts([good, bad, third, merged(third), fourth, merged(fourth)])
        broken = replace(there, verdicts={bad.name: "failed"})
        made = plan(broken, LAST)
        assert kept_steps(made) == [1, 4]
        assert made.dropped == ()  # each of them tells that 4 is doubtful
        gone = plan(
            replace(
                broken,
                manifests=[*there.manifests, full(5)],
                live=[ManifestName(5, 1), *there.live],
            ),
            LAST,
        )
        keys = [decision.manifest.key for decision in gone.dropped]
        assert keys == [m.key for m in (merged(fourth), fourth, merged(third), third, bad, good)]

    def test_the_newest_validated_checkpoint_is_kept(self) -> None:
        there = facts([full(1), full(2), full(3)])
        validated = replace(there, verdicts={ManifestName(1, 1): "sample"})
        made = plan(validated, LAST)
        assert kept_steps(made) == [1, 3]
        assert made.kept[ManifestName(1, 1)] == "newest validated"

    def test_what_cannot_be_read_stops_everything(self) -> None:
        there = replace(facts([full(1), full(2)]), unreadable=["manifests/x.json"])
        with pytest.raises(RetentionRefused, match="cannot be read"):
            plan(there, LAST)


class TestRefusals:
    """What would leave nothing to go back to."""

    def test_nothing_that_restores(self) -> None:
        with pytest.raises(RetentionRefused, match="no checkpoint of the live line"):
            plan(facts([full(1), full(2, whole=False)], live=[ManifestName(2, 1)]), LAST)

    def test_a_fresh_start_without_a_checkpoint_yet(self) -> None:
        with pytest.raises(RetentionRefused, match="no checkpoint of the live line"):
            plan(facts([full(1), full(2)], live=[]), LAST)

    def test_nothing_validated_where_the_policy_asks_for_it(self) -> None:
        there = facts([full(1), full(2), full(3)])
        policy = RetentionPolicy(keep_last=1)
        with pytest.raises(RetentionRefused, match="no validated checkpoint"):
            plan(there, policy)
        validated = replace(
            there, verdicts={ManifestName(2, 1): "sample", ManifestName(3, 1): "failed"}
        )
        assert kept_steps(plan(validated, policy)) == [2, 3]

    def test_a_metric_that_nothing_of_the_live_line_has(self) -> None:
        live, superseded = ManifestName(3, 2), ManifestName(2, 1)
        there = facts([full(1), full(2), full(3, generation=2)], live=[live, ManifestName(1, 1)])
        there = replace(there, metrics={"auc": {live: 0.7}, "loss": {superseded: 0.1}})
        by_auc = RetentionPolicy(best_by=(BestBy("auc", "max"),), require_validated=False)
        assert kept_steps(plan(there, by_auc)) == [3]
        for metric in ("acu", "loss"):
            misnamed = replace(LAST, best_by=(BestBy(metric, "max"),))
            with pytest.raises(RetentionRefused, match=f"a metric called '{metric}'"):
                plan(there, misnamed)

    def test_nothing_to_drop_is_no_reason_to_refuse(self) -> None:
        assert plan(facts([]), LAST).decisions == ()
        unmeasured = replace(LAST, best_by=(BestBy("auc", "max"),))
        assert plan(facts([full(1)]), unmeasured).dropped == ()
        assert plan(facts([full(1, whole=False)]), LAST).dropped == ()

    @pytest.mark.parametrize(
        "policy",
        [
            {},
            dict(keep_last=0),
            dict(keep_last=-1),
            dict(keep_last=True),
            dict(keep_last=10**10),
            dict(keep_within_seconds=float("nan")),
            dict(keep_within_seconds=-1.0),
            dict(best_by=(BestBy("AUC", "max"),)),
            dict(best_by=(BestBy("auc", "most"),)),  # type: ignore[arg-type]
            dict(best_by=(BestBy("auc", "max", 0),)),
            dict(require_validated=True),
        ],
    )
    def test_policies_that_are_none(self, policy: dict[str, Any]) -> None:
        with pytest.raises(SettingsError):
            RetentionPolicy(**policy)


class TestClocks:
    """A time from the future is kept, and takes no other's place."""

    def test_the_future_is_kept_beside_the_rest(self) -> None:
        there = [full(step, hours_ago=50 - step) for step in range(1, 6)]
        ahead = there[1]._replace(taken_ms=NOW_MS + 1)
        policy = RetentionPolicy(keep_hourly=2, require_validated=False)
        assert kept_steps(plan(facts(there), policy)) == [4, 5]
        made = plan(facts([there[0], ahead, *there[2:]]), policy)
        assert kept_steps(made) == [2, 4, 5]
        assert made.kept[ahead.name] == "its time is in the future"

    def test_the_future_takes_no_place_of_the_last_or_the_best(self) -> None:
        there = [*(full(step, hours_ago=50 - step) for step in range(1, 5)), full(5, hours_ago=-1)]
        last = RetentionPolicy(keep_last=2, require_validated=False)
        assert kept_steps(plan(facts(there), last)) == [3, 4, 5]
        best = RetentionPolicy(best_by=(BestBy("auc", "max", 2),), require_validated=False)
        auc = {ManifestName(step, 1): 0.5 + step / 100 for step in (1, 2, 5)}
        measured = replace(facts(there), metrics={"auc": auc})
        assert kept_steps(plan(measured, best)) == [1, 2, 5]

    def test_a_trainer_that_is_set_back_loses_nothing_that_is_within(self) -> None:
        # Restarted after step 3 with its clock 30 days back: the newest are no older than those.
        there = [full(step, hours_ago=60 - 10 * step) for step in range(1, 7)]
        back = [m._replace(taken_ms=m.taken_ms - 720 * HOUR_MS) for m in there[3:]]
        policy = RetentionPolicy(keep_within_seconds=25 * 3600, require_validated=False)
        assert kept_steps(plan(facts(there), policy)) == [4, 5, 6]
        assert kept_steps(plan(facts([*there[:3], *back]), policy)) == [1, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize("ahead", [2, 5])
    def test_a_stamp_that_time_has_caught_up_with_is_not_the_newest(self, ahead: int) -> None:
        # Stamped 20 hours ahead; now that is past, and the checkpoint may be the newest or not.
        there = [full(step, hours_ago=72 - 10 * step) for step in range(1, 6)]
        moved = list(there)
        moved[ahead - 1] = moved[ahead - 1]._replace(taken_ms=NOW_MS - HOUR_MS)
        policy = RetentionPolicy(keep_within_seconds=15 * 3600, require_validated=False)
        assert kept_steps(plan(facts(there), policy)) == [4, 5]
        assert {4, 5} <= set(kept_steps(plan(facts(moved), policy)))

    @pytest.mark.parametrize(("wrong", "days"), [(7, -30), (7, -3), (3, 1)])
    def test_a_wrong_stamp_takes_no_other_day(self, wrong: int, days: int) -> None:
        # Two on each of four days, but for Tuesday, which has one.
        there = fulls([82, 78, 58, 34, 32, 30, 10, 6])
        moved = [
            m._replace(taken_ms=m.taken_ms + 24 * days * HOUR_MS) if m.name.step == wrong else m
            for m in there.manifests
        ]
        policy = RetentionPolicy(keep_daily=3, require_validated=False)
        assert kept_steps(plan(there, policy)) == [3, 6, 8]
        assert {3, 6, 8} <= set(kept_steps(plan(facts(moved), policy)))

    def test_a_copied_run_is_retained_by_its_stamps(self) -> None:
        there = [full(step, hours_ago=240 - 24 * step) for step in range(1, 9)]
        copied = [m._replace(modified_ms=NOW_MS - HOUR_MS) for m in there]
        policy = RetentionPolicy(keep_daily=3, require_validated=False)
        assert kept_steps(plan(facts(copied), policy)) == [6, 7, 8]

    def test_a_trainer_that_stood_still_for_a_year_loses_nothing_by_that(self) -> None:
        there = [full(step, hours_ago=9000 - step) for step in range(1, 6)]
        policy = RetentionPolicy(keep_within_seconds=3 * 3600, require_validated=False)
        assert kept_steps(plan(facts(there), policy)) == [2, 3, 4, 5]


class TestNeededBeforeDeletion:
    """The last look before manifests go."""

    def test_what_was_committed_on_top_of_the_doomed_saves_them(self) -> None:
        first, second, third = chain(1, 2, 3)
        newest = full(9)
        doomed = frozenset({first.key, second.key})
        needed = needed_manifests(facts([first, second, third, newest]), doomed)
        assert needed.keys() == doomed

    def test_pins_leases_and_the_newest_save_theirs(self) -> None:
        first, second, newest = full(1), full(2), full(3)
        there = facts([first, second, newest])
        everything = frozenset({first.key, second.key, newest.key})
        assert needed_manifests(there, everything).keys() == {newest.key}
        pinned = replace(there, pins={first.name: ["pin"]}, leased={second.name: "restore"})
        assert needed_manifests(pinned, everything).keys() == everything

    def test_the_old_chain_beside_a_merged_full_is_not_needed(self) -> None:
        first, second, third, fourth = chain(1, 2, 3, 4)
        short = merged(third)
        there = facts([first, second, third, fourth, short])
        doomed = frozenset({first.key, second.key, third.key})
        assert needed_manifests(there, doomed) == {}
        damaged = facts([first, second, third, fourth, short._replace(whole=False)])
        assert needed_manifests(damaged, doomed).keys() == doomed


def test_ten_thousand_checkpoints_are_planned_in_one_pass() -> None:
    # Not a measurement (see `python -m benchmarks retention`): a quadratic plan takes minutes.
    there: list[StoredManifest] = []
    for step in range(10_000):
        there.append(full(step) if step % 500 == 0 else increment(step, there[-1]))
    started = time.monotonic()
    made = plan(
        facts(there),
        RetentionPolicy(keep_last=10, keep_hourly=24, keep_daily=7, require_validated=False),
    )
    assert time.monotonic() - started < 30
    assert len(made.decisions) == 10_000
