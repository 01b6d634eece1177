"""What is said of an error that nobody foresaw: one line, and where the traceback is."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from sparsebp_cli.run import home


@dataclass
class Crash:
    """How unexpected errors are told.

    Args:
        shown: Whether the traceback goes to the screen.
    """

    shown: bool = False

    def describe(self, error: Exception) -> str:
        """Return one line, after the traceback was shown or written to a file.

        Args:
            error: What nobody foresaw.

        Returns:
            A line for the user.
        """
        line = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, OSError):  # a full disk, a missing permission: the line says it all
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
