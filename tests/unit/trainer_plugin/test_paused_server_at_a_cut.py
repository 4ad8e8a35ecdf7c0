"""A server stands still around the cut while others stage: all states are of one moment.

DeepRec#1023 tells of parameter servers that each saved at a moment of its own.
"""

from __future__ import annotations

import os
import signal
import threading

from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import servers
from tests.training_builder import Place, until
from tests.unit.trainer_plugin.test_cached_checkpoints import SMALL, Both

#: The server goes on by itself, because the trainer waits for it in the cut.
_PAUSE_SECONDS = 0.4


def test_states_of_one_moment(place: Place) -> None:
    with servers(2) as home:
        assert isinstance(home, ServedHome)
        pid = home._servers[1].transport.hello().pid
        both = Both("adagrad", SMALL, home)
        with (
            place.agent(),
            both.checkpointer(place, at_servers=True, when_busy="wait") as ckpt,
        ):
            ckpt.restore()
            for before in (4, 4):  # batches before the pause; the next one ends in a cut
                both.train(ckpt, before)
                os.kill(pid, signal.SIGSTOP)
                goes_on = threading.Timer(_PAUSE_SECONDS, os.kill, (pid, signal.SIGCONT))
                goes_on.start()
                both.train(ckpt, 1)
                goes_on.join()
            both.train(ckpt, 2)
            until(lambda: ckpt.stats.committed == 2)
            ckpt.close(final=False)
    for step in (5, 10):
        expected = Both("adagrad", None)
        expected.train(None, step)
        restored = Both("adagrad", None)
        with restored.checkpointer(place) as again:
            report = again.restore(step, generation=1)
            assert report is not None and again.batches_done == step
            restored.same_as(expected)
            again.close(final=False)
