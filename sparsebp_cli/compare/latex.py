"""The leaderboard as a LaTeX table for a paper: booktabs, intervals, in bold what a statement shows to be a gain."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.report.board import Cell, find_withheld, make_board
from sparsebp_cli.run.visible import make_visible

SPECIAL = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "±": r"$\pm$", "<": "$<$"}
SPECIAL |= {">": "$>$", "|": "$|$"} | {letter: f"\\{letter}" for letter in "&%$#_{}"}


def to_latex(comparison: Comparison) -> str:
    """Return a ``tabular`` with the rows of the leaderboard; its comments say what it needs and what it means."""
    board, withheld = make_board(comparison), find_withheld(comparison)
    lines = [
        "% needs \\usepackage{booktabs}",
        f"% {_comment(board.note)}",
        "% Bold: shown to be better than the baseline, or cheaper; the verdicts below say how.",
        *(f"% {_comment(f'Step times are withheld: {label}')}" for label in withheld),
        *(f"% {_comment(f'{group.label}: {group.verdict}')}" for group in comparison.groups),
        f"\\begin{{tabular}}{{l{'r' * len(board.columns)}}}",
        "\\toprule",
        _row(["", *map(escape, board.columns)]),
        "\\midrule",
    ]
    lines += [_row([escape(row.label), *map(_number, row.cells)]) for row in board.rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def escape(text: str) -> str:
    """Return a text as LaTeX prints it; characters that steer LaTeX are escaped."""
    return "".join(SPECIAL.get(letter, letter) for letter in make_visible(text))


def _number(cell: Cell) -> str:
    shown = _signs(escape(cell.text))
    interval = f" {{[}}{_signs(escape(cell.interval.removeprefix('[')))}" if cell.interval else ""
    return (f"\\textbf{{{shown}}}" if cell.is_gain else shown) + interval


def _signs(text: str) -> str:
    """Write the sign of a number as mathematics, where a hyphen would be too short; a lone dash stays."""
    return re.sub(r"(?<![\w.])([-+])(?=\d)", r"$\1$", text)


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _comment(text: str) -> str:
    return " ".join(make_visible(text).split())
