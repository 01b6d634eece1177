"""Send an event log to a tracker, one record a write, and die at a random moment; for ``check_tracker``.

python -m sparsebp_tools.tracker.sender RUN_FOLDER NAME SECONDS
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from sparsebp_cli.run import RunFolder
from sparsebp_cli.tracker import TrackerSession
from sparsebp_tools.tracker.door import Door


class MortalDoor(Door):
    """A door whose process is killed some seconds after its session began, since imports take longest."""

    seconds: float

    def _find_session(self) -> TrackerSession:
        is_first = self._session is None
        session = super()._find_session()
        if is_first:
            signal.setitimer(signal.ITIMER_REAL, self.seconds)  # SIGALRM has no handler, so it kills
        return session


def main() -> None:
    """Send until the end of the event log, or of this process."""
    door = MortalDoor(RunFolder(Path(sys.argv[1])), sys.argv[2], batch=1)
    door.seconds = float(sys.argv[3])
    door.send()
    signal.pause()


if __name__ == "__main__":
    main()
