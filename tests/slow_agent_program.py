"""Runs an agent whose store hangs: in an upload of one run, and before the persist of another run.

At its end, the agent waits only one second for jobs at work; other agents wait 25 seconds.
"""

from __future__ import annotations

import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recpoint.catalog.persist import persist
from recpoint.catalog.store.store import S3Timeouts, Store, open_store
from recpoint.flows.agent import agent
from tests.interposed_store import InterposedStore

__all__ = ["UPLOADS"]

#: Part of the name of the run whose upload hangs.
UPLOADS = "uploads"

_LONG_SECONDS = 20.0


def _stand_still_in_an_upload(call: str, key: str) -> None:
    if call.startswith("put") and key.startswith("chunks/"):
        logging.info("uploading")
        time.sleep(_LONG_SECONDS)


def _stand_still_until_python_ends(call: str, key: str) -> None:
    if key != "run.json":
        return
    logging.info("looking")
    for _ in range(int(_LONG_SECONDS / 0.05)):
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(int)
            except RuntimeError:  # Python has begun to exit: thread pools take no more work
                return
        time.sleep(0.05)


def _open(run_url: str, timeouts: S3Timeouts) -> Store:
    waits = _stand_still_in_an_upload if UPLOADS in run_url else _stand_still_until_python_ends
    return InterposedStore(open_store(run_url, timeouts=timeouts), before=waits)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    agent._DRAIN_SECONDS = 1.0
    vars(persist)["open_store"] = _open
    sys.exit(agent.run_agent(Path(sys.argv[1]), prefect="off", consolidate="off", sweep_every=None))
