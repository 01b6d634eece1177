"""How a picture becomes a file; the same picture gives the same file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
OPTIONS = {"svg.hashsalt": "sparsebp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def check_path(path: Path) -> None:
    """Refuse a file that no picture can become, before anything is drawn.

    Args:
        path: Where to.

    Raises:
        UsageError: The ending is not one of a picture, or the folder does not exist.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"a picture's name must end in {', '.join(ENDINGS)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the picture")


def save(figure: Figure, path: Path) -> Path:
    """Write a picture; the same content gives the same file.

    Args:
        figure: Of matplotlib.
        path: Where to; it is replaced.

    Returns:
        The path.
    """
    metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
    figure.savefig(path, dpi=150, metadata=metadata)
    return path
