"""Goes back to the newest checkpoint when an embedding server has lost its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from recpoint.errors import ClusterLost, RankLost, ServerLost

__all__ = ["Rewinds"]

_log = logging.getLogger("recpoint")


class Rewinds:
    """Counts how often training has gone back, and goes back as often as the script allows.

    Args:
        most: how often training may go back.
        check: raises if training cannot go back now.
        back: goes back; it raises the error that it is given if there is nothing to go back to.
    """

    def __init__(
        self,
        most: int,
        *,
        check: Callable[[], object],
        back: Callable[[ServerLost | RankLost], None],
    ) -> None:
        self._most = most
        self._check = check
        self._back = back
        self._done = 0

    def rewind(self, error: ServerLost | RankLost) -> None:
        """Go back to the newest checkpoint.

        If a server is lost in the restore, it is restored once more. That counts as going back.

        Raises:
            ServerLost, RankLost: as given, or of the restore: there is no checkpoint, or nowhere to
                restore it to, or this is one time too many.
            RecpointError: as `Checkpointer.restore`.
        """
        lost = error
        while True:
            if isinstance(lost, ClusterLost) or self._done >= self._most:
                raise lost
            self._done += 1
            if lost is error:
                self._check()
            _log.warning("%s. Training goes back to the newest checkpoint", lost)
            try:
                self._back(lost)
            except (ServerLost, RankLost) as again:
                if again is lost:  # there is nothing to go back to
                    raise
                lost = again
            else:
                return
