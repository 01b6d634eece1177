"""Writing of pictures to files; equal pictures give equal files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
OPTIONS = {"svg.hashsalt": "sparsebp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def check_path(path: Path) -> None:
    """Raise UsageError for a path that is no picture's or whose folder does not exist, before anything is drawn."""
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"a picture's name must end in {', '.join(ENDINGS)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the picture")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure of matplotlib to a path, which is replaced, and return the path; equal content gives equal
    files."""
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=150, metadata=metadata)
    return path
