"""Runs an agent that gets SIGTERM at the worst moment while its main thread waits.

The worst moment is inside an Event's own code if the thread waits for an Event, and else just
before a sleep.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from recpoint.flows.agent.agent import run_agent

_HANGS_SECONDS = 20.0
#: The functions in which the main thread waits for a job, and for its turn.
_WAITING = ("recpoint.flows.agent.agent", "recpoint.flows.agent.agent")
_sent = False


def _signal_once(frame: FrameType, event: str, called: object) -> None:
    global _sent
    sleeps = called is time.sleep and frame.f_globals["__name__"] in _WAITING
    waits = sleeps or frame.f_code is threading.Condition.wait.__code__
    obeyed = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if event == "c_call" and waits and obeyed and not _sent:
        _sent = True
        print("signalled", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_HANGS_SECONDS, exit=True)
    sys.setprofile(_signal_once)
    sys.exit(run_agent(Path(sys.argv[1]), prefect="off", consolidate="off", sweep_every=None))
