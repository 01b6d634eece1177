"""The error line of an unexpected exception, and the place of its traceback."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from sparsebp_cli.run import home


@dataclass
class Crash:
    """How unexpected errors are shown; ``shown`` prints the traceback to the screen."""

    shown: bool = False

    def describe(self, error: Exception) -> str:
        """Show the traceback or write it to a file, and return one line for the user."""
        line = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, OSError):  # a full disk or a missing permission: its text is enough
            line = " ".join(str(error).split())
        trace = "".join(traceback.format_exception(error))
        if self.shown:
            return f"{line}\n{trace}".rstrip()
        file = home() / "error.log"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(trace, encoding="utf-8")
        except OSError:
            return f"{line} (`sparsebp --debug` shows the traceback)"
        return f"{line} (the traceback is in {file}; `sparsebp --debug` shows it)"
