"""Follow a run: score one request again and again, and print a line when the version changes.

python serving_follow.py [newest|validated|published] [UNTIL_STEP]
"""

import os
import sys
import time
from typing import Any

import torch

from recpoint import Follower
from serving_train import Clicks

channel: Any = sys.argv[1] if len(sys.argv) > 1 else "newest"
until_step = int(sys.argv[2]) if len(sys.argv) > 2 else None
request = torch.arange(8).unsqueeze(0)  # the items that somebody has seen
run = os.environ.get("RUN", "runs/served")

with Follower(run, model=Clicks(), channel=channel, poll_seconds=0.5) as follower:
    follower.wait(seconds=600)  # for the first version
    shown = None
    while shown is None or shown != until_step:
        with follower.reading() as version:  # one checkpoint, whole, until the block ends
            logits: Any = version(request)
            step = version.step
        if step != shown:
            shown = step
            print(f"step {step}: score {torch.sigmoid(logits).item():.4f}", flush=True)
        time.sleep(0.05)  # until the next request
