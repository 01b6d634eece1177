"""The position in a remote worker's output up to which it was copied, by the time stamps that its engine adds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from sparsebp_cli.run import RunFolder

FILE = ".output-position"
STAMPED = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) (.*)$", re.DOTALL)


@dataclass
class LogPosition:
    """The last line that was copied.

    Args:
        stamp: Its time stamp; empty: none was copied.
        key: The same in nanoseconds.
    """

    stamp: str = ""
    key: int = 0

    @classmethod
    def load(cls, run: RunFolder) -> Self:
        """Read the position from a run's folder."""
        try:
            return cls(**json.loads((run.path / FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return cls()

    def append(self, run: RunFolder, lines: Iterable[str]) -> None:
        """Append the new lines to ``worker.log``, ordered by the stamp before each; lines without one are dropped.

        A log that was truncated at its beginning in the meantime loses lines but repeats none.
        """
        found = [(match, _nanoseconds(match)) for line in lines if (match := STAMPED.match(line))]
        new = sorted((item for item in found if item[1] > self.key), key=lambda item: item[1])
        if not new:
            return
        with run.log_file.open("a", encoding="utf-8") as log:
            log.writelines(match[4] + "\n" for match, _ in new)
        last, self.key = new[-1]
        self.stamp = last[0].partition(" ")[0]
        part = run.path / f"{FILE}.part"
        part.write_text(json.dumps({"stamp": self.stamp, "key": self.key}), encoding="utf-8")
        part.replace(run.path / FILE)


def _nanoseconds(match: re.Match[str]) -> int:
    seconds = int(datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00")).timestamp())
    return seconds * 10**9 + int((match[2] or "0").ljust(9, "0")[:9])
