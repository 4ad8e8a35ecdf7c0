"""Plans of retention for any run and any policy: what must hold whatever was committed when."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from recpoint.catalog.retention.keep import RetentionPlan, needed_manifests, plan
from recpoint.catalog.retention.rules import BestBy, RetentionPolicy
from recpoint.catalog.run.representations import Opinion, Representations, RunFacts, StoredManifest
from recpoint.errors import RetentionRefused
from recpoint.format.naming import ManifestName
from tests.retention_facts import HOUR_MS, NOW_MS, facts, full, increment, merged

_OPINIONS: st.SearchStrategy[Opinion] = st.sampled_from(["failed", "stateless", "sample", "full"])
_COUNTS = st.integers(0, 3)
_WITHIN = st.sampled_from([0.0, 3600.0, 100 * 3600.0])


@st.composite
def runs(draw: st.DrawFn) -> RunFacts:
    """Runs of up to three generations with merged manifests, damage, pins, leases and skew."""
    there: list[StoredManifest] = []
    own: list[StoredManifest] = []
    for step in range(draw(st.integers(1, 14))):
        hours = draw(st.floats(0, 400))
        stored = draw(st.one_of(st.just(hours), st.floats(0, 400)))
        whole = draw(st.integers(0, 9)) > 0
        generation = max((m.name.generation for m in own), default=1) + (
            draw(st.integers(0, 5)) == 0
        )
        before = [m for m in own if m.name.generation <= generation]
        if not before or draw(st.integers(0, 3)) == 0:
            made = full(step, generation=generation, hours_ago=hours, whole=whole)
        else:
            parent = draw(st.sampled_from(before[-3:]))
            made = increment(step, parent, generation=generation, hours_ago=hours, whole=whole)
        made = made._replace(
            modified_ms=NOW_MS - int(stored * HOUR_MS), state_whole=draw(st.integers(0, 9)) > 0
        )
        own.append(made)
        there.append(made)
        if made.parent is not None and draw(st.integers(0, 2)) == 0:
            back = draw(st.sampled_from([None, *before]))
            short = merged(made, back)._replace(whole=draw(st.integers(0, 9)) > 0)
            there.append(short._replace(state_whole=draw(st.integers(0, 9)) > 0))
    names = [m.name for m in own]
    live = [name for name in names if draw(st.integers(0, 5)) > 0]
    some = st.sets(st.sampled_from(names), max_size=2)
    return replace(
        facts(draw(st.permutations(there)), live=live),
        pins={name: ["pin"] for name in draw(some)},
        leased={name: "lease" for name in draw(some)},
        verdicts={name: draw(_OPINIONS) for name in draw(some)},
        metrics={"auc": {name: draw(st.floats(-1, 1)) for name in draw(some)}},
        lost=draw(st.sets(st.integers(1, 3), max_size=1)),
    )


policies = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 3),
    keep_within_seconds=_WITHIN,
    keep_hourly=_COUNTS,
    keep_daily=_COUNTS,
    keep_weekly=_COUNTS,
    keep_monthly=_COUNTS,
    best_by=st.sampled_from([(), (BestBy("auc", "max"),), (BestBy("auc", "min", 2),)]),
    require_validated=st.booleans(),
)


def planned(run: RunFacts, policy: RetentionPolicy) -> RetentionPlan | None:
    try:
        return plan(run, policy)
    except RetentionRefused:
        return None


def dropped_keys(made: RetentionPlan) -> set[str]:
    return {decision.manifest.key for decision in made.dropped}


def left(run: RunFacts, made: RetentionPlan) -> Representations:
    dropped = dropped_keys(made)
    return Representations(m for m in run.manifests if m.key not in dropped)


@given(runs(), policies)
def test_every_kept_checkpoint_restores_as_it_did(run: RunFacts, policy: RetentionPolicy) -> None:
    made = planned(run, policy)
    if made is None:
        return
    before, after = Representations(run.manifests, run.verdicts), left(run, made)
    for name in made.kept:
        assert after.best(name) == before.best(name)
        assert after.of(name)
    for name in {*run.pins, *run.leased, *run.live[:1]}:
        assert after.best(name) == before.best(name)
    for name in {*run.leased, *run.live[:1]}:
        assert set(after.of(name)) == set(before.of(name))
    good = [name for name in run.live if before.is_trusted(name)]
    if good:
        assert after.best(good[0]) is not None
    if policy.require_validated and made.dropped:
        assert any(after.best(name) for name in good if before.is_validated(name))
    assert len(made.decisions) == len(run.manifests)


@given(runs(), policies, st.data())
def test_deleting_in_order_leaves_every_remaining_checkpoint_whole(
    run: RunFacts, policy: RetentionPolicy, data: st.DataObject
) -> None:
    made = planned(run, policy)
    if made is None:
        return
    before = Representations(run.manifests)
    order = [decision.manifest.key for decision in made.dropped]
    killed_after = data.draw(st.integers(0, len(order)))
    gone = set(order[:killed_after])
    rest = [m for m in run.manifests if m.key not in gone]
    after = Representations(rest)
    for manifest in rest:
        # Not of one form only: each manifest that is left still has the chain it leads to.
        if before.best(manifest.name) is not None:
            assert after.best(manifest.name) is not None
        if manifest.parent is not None and before.of(manifest.parent):
            assert after.of(manifest.parent)
    again = planned(replace(run, manifests=rest), policy)
    assert again is not None
    assert dropped_keys(again) == set(order[killed_after:])


@given(runs(), policies, policies)
def test_a_further_rule_only_keeps_more(
    run: RunFacts, one: RetentionPolicy, other: RetentionPolicy
) -> None:
    both = replace(
        one,
        keep_last=max(one.keep_last, other.keep_last),
        keep_within_seconds=max(one.keep_within_seconds, other.keep_within_seconds),
        keep_hourly=max(one.keep_hourly, other.keep_hourly),
        keep_daily=max(one.keep_daily, other.keep_daily),
        keep_weekly=max(one.keep_weekly, other.keep_weekly),
        keep_monthly=max(one.keep_monthly, other.keep_monthly),
        best_by=one.best_by + other.best_by,
    )
    less, more = planned(run, one), planned(run, both)
    if less is None or more is None:
        return
    assert less.kept.keys() <= more.kept.keys()
    assert dropped_keys(more) <= dropped_keys(less)


def on_time(run: RunFacts) -> RunFacts:
    """The run with the store's times as right as the stamps are; merged manifests are later."""
    own = [m._replace(modified_ms=m.taken_ms) for m in run.manifests]
    later = [
        m._replace(modified_ms=(m.taken_ms + NOW_MS) // 2) if m.key.startswith("c") else m
        for m in own
    ]
    return replace(run, manifests=later)


@given(runs(), policies, st.data())
def test_stamps_that_are_wrong_either_way_drop_nothing_more(
    run: RunFacts, policy: RetentionPolicy, data: st.DataObject
) -> None:
    run = on_time(run)
    names = sorted({m.name for m in run.manifests})
    times = st.one_of(
        st.integers(0, NOW_MS + 10**11),
        st.integers(NOW_MS - 500 * HOUR_MS, NOW_MS + HOUR_MS),
    )
    skewed = data.draw(st.dictionaries(st.sampled_from(names), times))
    moved = [m._replace(taken_ms=skewed.get(m.name, m.taken_ms)) for m in run.manifests]
    right, wrong = planned(run, policy), planned(replace(run, manifests=moved), policy)
    if right is not None:
        assert wrong is not None
        assert dropped_keys(wrong) <= dropped_keys(right)


@given(runs(), policies, st.data())
def test_a_store_whose_times_are_wrong_has_nothing_more_dropped(
    run: RunFacts, policy: RetentionPolicy, data: st.DataObject
) -> None:
    run = on_time(run)
    wrong_ms = data.draw(
        st.lists(
            st.integers(0, NOW_MS + 10**11),
            min_size=len(run.manifests),
            max_size=len(run.manifests),
        )
    )
    moved = [m._replace(modified_ms=ms) for m, ms in zip(run.manifests, wrong_ms, strict=True)]
    right, wrong = planned(run, policy), planned(replace(run, manifests=moved), policy)
    if right is not None:
        assert wrong is not None
        assert dropped_keys(wrong) <= dropped_keys(right)


@given(runs(), policies, st.integers(0, 10**12))
def test_a_clock_that_is_behind_drops_nothing_more(
    run: RunFacts, policy: RetentionPolicy, behind: int
) -> None:
    right = planned(run, policy)
    wrong = planned(replace(run, now_ms=max(0, NOW_MS - behind)), policy)
    if right is not None and wrong is not None:
        assert dropped_keys(wrong) <= dropped_keys(right)


@given(runs(), policies)
def test_a_clock_that_is_ahead_drops_nothing_more(run: RunFacts, policy: RetentionPolicy) -> None:
    right = planned(run, policy)
    wrong = planned(replace(run, now_ms=NOW_MS + 10**12), policy)
    if right is not None and wrong is not None:
        assert dropped_keys(wrong) == dropped_keys(right)


@given(runs(), policies)
def test_no_checkpoint_of_a_lost_generation_goes(run: RunFacts, policy: RetentionPolicy) -> None:
    made = planned(run, policy)
    kept = {m.name for m, action, _ in made.decisions if action == "keep"} if made else set()
    lost = {m.name for m in run.manifests if m.name.generation in run.lost}
    assert made is None or lost <= kept
    doomed = frozenset(m.key for m in run.manifests)
    left = {m.name for m in run.manifests if m.key in needed_manifests(run, doomed)}
    assert lost <= left


@given(runs(), policies)
def test_what_a_plan_drops_nothing_else_needs(run: RunFacts, policy: RetentionPolicy) -> None:
    made = planned(run, policy)
    if made is None:
        return
    doomed = frozenset(dropped_keys(made))
    assert needed_manifests(run, doomed) == {}


@given(runs(), st.data())
def test_whatever_was_doomed_what_is_left_restores_as_before(
    run: RunFacts, data: st.DataObject
) -> None:
    keys = sorted(m.key for m in run.manifests)
    doomed = frozenset(data.draw(st.sets(st.sampled_from(keys))))
    gone = doomed - needed_manifests(run, doomed).keys()
    before = Representations(run.manifests)
    after = Representations(m for m in run.manifests if m.key not in gone)
    kept: set[ManifestName] = {m.name for m in run.manifests if m.key not in doomed}
    for name in kept | set(run.pins) | set(run.leased) | set(run.live[:1]):
        assert after.best(name) == before.best(name)
