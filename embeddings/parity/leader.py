"""Leads the servers of a training: finds lost ones, and has them replaced.

One process of a training, the leader, does this. For each server it knows a `LedState`:

    WHOLE ──► LOST ──► FORGOTTEN ──► BEGUN ──► OPEN ──► WHOLE

A server is lost in any state. If a step fails, because another server is lost meanwhile or no
successor starts, the next look begins again at LOST, with another successor. Every call to a server
may be repeated.

If more servers are not whole than parity makes up for, the leader gives up. Then `clear` has all
servers begin anew, without rows.

Two servers that both live may not reach each other. They say so when the leader greets them, and
the leader takes one of them for lost; see `_cut_off`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final, NamedTuple

from recpoint.catalog.store.contract import now_ms
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.replacement import LedServer, LedState, Replacement
from recpoint.errors import ClusterLost, HomeError

__all__ = ["Leader", "LostTimes"]

_LOG: Final = logging.getLogger("recpoint")
#: How often the leader looks whether all servers live, and how far recoveries are.
_LOOK_SECONDS: Final = 0.5
#: How often the log says how far a recovery is, and repeats an error.
_TELL_SECONDS: Final = 10.0
#: How often one of two servers that do not reach each other is replaced. Then the leader gives up:
#: new processes do not mend a network.
_MOST_CUTS: Final = 2


class LostTimes(NamedTuple):
    """When a server was lost, and had all its rows again (None: not yet); in ms since the epoch."""

    lost_ms: int
    whole_ms: int | None


class Leader:
    """Leads servers. All calls may come from several threads.

    Args:
        servers: in the order of their numbers; all have begun.
        parity: how many of them may be lost at a time.

    Attributes:
        has_given_up: whether more servers are lost than parity makes up for, or all are beginning
            anew.
        missing_rows: how many rows and parity rows are left to recover, by the number of a server
            that recovers and has said so.
        losses: the last loss of each server that was lost, by its number.

    Raises:
        ServerLost: a server does not answer.
    """

    def __init__(self, servers: Sequence[LedServer], parity: int) -> None:
        self._servers = tuple(servers)
        self._parity = parity
        self._states = [LedState.WHOLE] * len(self._servers)
        self._lost_at: dict[int, float] = {}
        self._replacement = Replacement(self._servers)
        self.has_given_up = False
        self.missing_rows: Mapping[int, int] = {}  # replaced, never changed: other threads read it
        self.losses: Mapping[int, LostTimes] = {}  # the same
        self._cuts: Counter[frozenset[int]] = Counter()  # see `_cut_off`
        self._greeting = ThreadPoolExecutor(
            max(1, len(self._servers) - 1), thread_name_prefix="recpoint-greet"
        )
        self._looks = 0  # that have begun; guarded by `_leading`
        self._leading = threading.Lock()
        self._is_over = threading.Event()
        self._logged_at: dict[str, float] = {}  # what the log repeats -> when it said so
        self._watch: threading.Thread | None = None
        self._replacement.protect_all()

    @property
    def states(self) -> tuple[LedState, ...]:
        """The state of each server."""
        return tuple(self._states)

    @property
    def not_whole(self) -> tuple[int, ...]:
        """Numbers of servers that have not all their rows, ascending."""
        return tuple(
            number for number, state in enumerate(self._states) if state is not LedState.WHOLE
        )

    @property
    def lost_rows(self) -> int:
        """Rows and parity rows that are left to recover, as far as the last look saw."""
        return sum(self.missing_rows.values())

    def add_table(self, table: str) -> int:
        """Have successors get a table, too; return how often the table was cleared.

        The caller adds it at the servers as they are now.
        """
        with self._leading:
            return self._replacement.add_table(table)

    def watch(self) -> None:
        """Look every half second in a thread of its own, as long as the leader is referred to."""
        self._watch = threading.Thread(
            target=_look_again,
            args=(weakref.ref(self), self._is_over),
            name="recpoint-watch",
            daemon=True,
        )
        self._watch.start()

    def end(self) -> None:
        """Look no more. A look that is under way gets to its end."""
        self._is_over.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join()
        self._greeting.shutdown(wait=False)

    def look(self) -> None:
        """Replace servers that are lost, as far as parity makes up for them.

        It raises no error: the log has it, and the next look tries again. Of several threads that
        wait to look, one does.
        """
        looks_before = self._looks
        with self._leading:
            if self._looks == looks_before and not self.has_given_up and not self._is_over.is_set():
                self._look()

    def _look(self) -> None:
        self._looks += 1
        try:
            newly_lost = self._find_lost()
            self._note_progress()
            lost = self._in_state(LedState.LOST)
            if not lost and (cut_off := self._cut_off()) is not None:
                self._note_lost(cut_off)
                newly_lost, lost = [cut_off], [cut_off]
            if lost and len(self.not_whole) > self._parity:
                self._give_up()
            elif lost:
                for number in newly_lost:
                    _LOG.warning(
                        "embedding server %d is lost; its rows are recovered while training goes "
                        "on",
                        number + 1,
                    )
                self._replacement.replace(lost, self._states.__setitem__)
        except ClusterLost:
            pass  # nothing begins again, and all calls say so
        except (HomeError, OutOfStep) as error:
            # Another server is lost meanwhile, or no successor starts.
            self._tell(str(error), "embedding servers: a recovery begins again: %s", error)
        except Exception as error:  # noqa: BLE001  # Ray has errors of its own; none may end training
            text = f"{type(error).__name__}: {error}"
            self._tell(text, "embedding servers: a recovery begins again: %s", text)

    def _find_lost(self) -> list[int]:
        """Have all servers in state WHOLE, OPEN or LOST; return those that answered before."""
        answered = self._in_state(LedState.WHOLE, LedState.OPEN)
        newly_lost = [
            number
            for number, lives in zip(answered, self._live(answered), strict=True)
            if not lives
        ]
        for number in newly_lost:
            self._note_lost(number)
        for number in self._in_state(LedState.FORGOTTEN, LedState.BEGUN):
            # A replacement that was not finished begins again, with another successor.
            self._states[number] = LedState.LOST
        return newly_lost

    def _live(self, numbers: Sequence[int]) -> list[bool]:
        """Ask servers at the same time whether they live: one that hangs delays no other."""
        if not numbers:
            return []
        *first_numbers, last = numbers
        answers = [self._greeting.submit(self._servers[number].lives) for number in first_numbers]
        try:
            last_lives = self._servers[last].lives()
        finally:
            wait(answers)
        return [*(answer.result() for answer in answers), last_lives]

    def _note_lost(self, number: int) -> None:
        self._states[number] = LedState.LOST
        self._lost_at[number] = time.monotonic()
        loss = self.losses.get(number)
        if loss is None or loss.whole_ms is not None:
            self.losses = {**self.losses, number: LostTimes(now_ms(), None)}

    def _cut_off(self) -> int | None:
        """Return a server that lives, and that another one that lives does not reach.

        Writes to one of them cannot be acknowledged before the other is forgotten. The server with
        the most links that are cut is taken for lost; of two with as many, the one that more
        servers do not reach. If its successor is cut off as well, the other server's turn comes,
        and then the leader gives up.
        """
        by_incarnation = {server.incarnation: number for number, server in enumerate(self._servers)}
        cut_links = [
            (source, by_incarnation[incarnation])
            for source, server in enumerate(self._servers)
            for incarnation in server.unreached
            if incarnation in by_incarnation
        ]
        pairs = {frozenset(pair) for pair in cut_links if pair[0] != pair[1]}
        if not pairs:
            return None
        cuts_of = Counter(number for pair in pairs for number in pair)
        accusers_of = Counter(target for _, target in cut_links)

        def order(number: int) -> tuple[bool, int, int, int]:
            # The one whose loss parity makes up for, as long as there is one.
            is_affordable = len({*self.not_whole, number}) <= self._parity
            return is_affordable, cuts_of[number], accusers_of[number], number

        ranked = sorted(cuts_of, key=order, reverse=True)
        chosen = ranked[0]
        if any(self._cuts[pair] for pair in pairs if chosen in pair):
            chosen = next((number for number in ranked[1:] if order(number)[0]), chosen)
        names = "; ".join(_names(sorted(pair)) for pair in sorted(pairs, key=sorted))
        if max(self._cuts[pair] for pair in pairs) >= _MOST_CUTS:
            self._note_lost(chosen)
            _LOG.error(
                "embedding servers do not reach each other (%s), and new processes do not either: "
                "look at the network between their hosts",
                names,
            )
            self._give_up()
            return None
        self._cuts.update(pairs)
        _LOG.warning(
            "embedding servers do not reach each other (%s): server %d is taken for lost",
            names,
            chosen + 1,
        )
        return chosen

    def _note_progress(self) -> None:
        """Learn how far recoveries are, and say so in the log."""
        missing_rows: dict[int, int] = {}
        for number in self._in_state(LedState.OPEN):
            try:
                count = self._servers[number].known()
            except (HomeError, OutOfStep):
                continue  # the next look says what is the matter
            if count.known < count.all:
                missing_rows[number] = count.all - count.known
                continue
            self._states[number] = LedState.WHOLE
            for pair in [pair for pair in self._cuts if number in pair]:
                del self._cuts[pair]
            loss = self.losses[number]._replace(whole_ms=now_ms())
            self.losses = {**self.losses, number: loss}
            _LOG.warning(
                "embedding server %d is recovered after %.1f s: all rows are there, with their "
                "parity",
                number + 1,
                time.monotonic() - self._lost_at.pop(number),
            )
        self.missing_rows = missing_rows
        if missing_rows:
            self._tell(
                "progress",
                "embedding servers (%s): %d rows and parity rows are left to recover",
                _names(self.not_whole),
                self.lost_rows,
            )

    def _give_up(self) -> None:
        """Have all trainers raise ServerLost; those that do not lead ask the living servers."""
        self.has_given_up = True
        for number in self._in_state(LedState.WHOLE, LedState.OPEN):
            with suppress(HomeError, OutOfStep):
                self._servers[number].give_up()
        _LOG.error(
            "embedding servers: %s lost or not recovered yet, of which parity makes up for %d; a "
            "restore of the last checkpoint starts them again",
            _names(self.not_whole),
            self._parity,
        )

    def _in_state(self, *states: LedState) -> list[int]:
        return [number for number, state in enumerate(self._states) if state in states]

    def _tell(self, topic: str, text: str, *values: object) -> None:
        """Log something that would be said at each look, at most every few seconds."""
        now = time.monotonic()
        if now > self._logged_at.get(topic, -_TELL_SECONDS) + _TELL_SECONDS:
            self._logged_at = {
                old_topic: logged_at
                for old_topic, logged_at in self._logged_at.items()
                if now < logged_at + _TELL_SECONDS
            }
            self._logged_at[topic] = now
            _LOG.warning(text, *values)

    def clear(self, table: str) -> None:
        """Have all servers forget all rows of a table.

        If servers are lost that cannot be replaced, all servers begin anew, without any rows. So a
        caller that clears a table after a ServerLost clears all tables.

        Raises:
            ServerLost, HomeError, OutOfStep: a server is lost meanwhile, or does not start.
        """
        with self._leading:
            if not self.has_given_up:
                self._look()
            if self.has_given_up or self._in_state(
                LedState.LOST, LedState.FORGOTTEN, LedState.BEGUN
            ):
                self._begin_anew()
            self._replacement.clear(table)

    def _begin_anew(self) -> None:
        """Have all servers begin without rows."""
        self.has_given_up = True  # until all have begun
        self._replacement.begin_anew(self._live(range(len(self._servers))))
        self._states = [LedState.WHOLE] * len(self._servers)
        self._lost_at.clear()
        self._cuts.clear()
        self.missing_rows, self.losses = {}, {}
        self.has_given_up = False


def _look_again(leader_of: Callable[[], Leader | None], is_over: threading.Event) -> None:
    """Look until the leader has ended. The thread refers to it only while it looks."""
    while not is_over.wait(_LOOK_SECONDS):
        leader = leader_of()
        if leader is None:
            return
        leader.look()
        del leader


def _names(numbers: Iterable[int]) -> str:
    return ", ".join(str(number + 1) for number in numbers)
