"""Draws the overview of a comparison, or one view, into a file."""

from __future__ import annotations

import warnings
from pathlib import Path

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.question import find_course
from sparsebp_cli.compare.view import View
from sparsebp_cli.run.picture import OPTIONS, check_path, save


def picture(comparison: Comparison, path: Path, view: View | None = None) -> Path:
    """Draw a comparison to ``.png``, ``.svg`` or ``.pdf`` and return the path; None is the overview.

    Raises ``UsageError`` for another ending or a missing folder.
    """
    check_path(path)
    view = view or View()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from sparsebp_cli.compare.draw.curve import draw_curve_page
    from sparsebp_cli.compare.draw.layer import draw_layers
    from sparsebp_cli.compare.draw.memory import draw_memory
    from sparsebp_cli.compare.draw.overview import draw_overview
    from sparsebp_cli.compare.draw.pareto import draw_pareto

    # Names are text, never formulas. The font draws letters that it lacks as boxes: ignore that warning.
    with mpl.rc_context(OPTIONS | {"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure = Figure(layout="constrained")
        match view.kind:
            case "curves":
                draw_curve_page(figure, comparison, view.metric or find_course(comparison.metric), view.along)
            case "pareto":
                draw_pareto(figure, comparison)
            case "layers":
                draw_layers(figure, comparison)
            case "memory":
                draw_memory(figure, comparison)
            case "overview":
                draw_overview(figure, comparison)
        return save(figure, path)
