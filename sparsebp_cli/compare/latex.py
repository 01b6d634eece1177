"""The leaderboard as a LaTeX table for a paper: booktabs, intervals, the best mean of a column in bold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.report.board import Board, Cell, find_busy, make_board
from sparsebp_cli.run.visible import make_visible

SPECIAL = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "±": r"$\pm$", "<": "$<$"}
SPECIAL |= {">": "$>$", "|": "$|$"} | {letter: f"\\{letter}" for letter in "&%$#_{}"}
COST_COLUMNS = {"step time", "peak memory"}


def to_latex(comparison: Comparison) -> str:
    """Return a ``tabular`` with the rows of the leaderboard; its comments say what it needs and what it means."""
    board = make_board(comparison, find_busy(comparison))
    best = _find_best(board, comparison)
    lines = [
        "% needs \\usepackage{booktabs}",
        f"% {_comment(board.note)}",
        "% Bold: the best mean of a column, whether or not a difference was shown; the verdicts below say which were.",
        *(f"% {_comment(f'{group.label}: {group.verdict}')}" for group in comparison.groups),
        f"\\begin{{tabular}}{{l{'r' * len(board.columns)}}}",
        "\\toprule",
        _row(["", *map(escape, board.columns)]),
        "\\midrule",
    ]
    for row in board.rows:
        cells = [_number(cell, is_best=row.number == best[place]) for place, cell in enumerate(row.cells)]
        lines.append(_row([escape(row.label), *cells]))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def escape(text: str) -> str:
    """Return a text as LaTeX prints it; characters that steer LaTeX are escaped."""
    return "".join(SPECIAL.get(letter, letter) for letter in make_visible(text))


def _find_best(board: Board, comparison: Comparison) -> list[int | None]:
    """Return the number of the best row of each column; None where the direction is unknown, or where no difference
    is better than none."""
    found: list[int | None] = []
    for place, column in enumerate(board.columns):
        is_cost = column in COST_COLUMNS
        sign = 1.0 if is_cost else {"lower": 1.0, "higher": -1.0, "": 0.0}[comparison.better]
        values = {row.number: sign * value for row in board.rows if (value := row.cells[place].value) is not None}
        number = min(values, key=lambda key: values[key]) if values and sign else None
        limit = None if place == 0 else 1.0 if is_cost else 0.0
        is_better = number is not None and (limit is None or values[number] < limit)
        found.append(number if is_better else None)
    return found


def _number(cell: Cell, *, is_best: bool) -> str:
    value, gap, interval = cell.text.partition(" [")
    shown = _signs(escape(value))
    return (f"\\textbf{{{shown}}}" if is_best else shown) + (f" {{[}}{_signs(escape(interval))}" if gap else "")


def _signs(text: str) -> str:
    """Write the sign of a number as mathematics, where a hyphen would be too short; a lone dash stays."""
    return re.sub(r"(?<![\w.])([-+])(?=\d)", r"$\1$", text)


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _comment(text: str) -> str:
    return " ".join(make_visible(text).split())
