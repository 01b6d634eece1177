"""What a researcher asks about a method before trying it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Saving = Literal["time", "memory", "steps"]


@dataclass(frozen=True)
class MethodCard:
    """The card of a policy, for the catalogue. All but ``use`` may be left out.

    Args:
        use: One or two sentences: when to use it, and when not.
        year: Year of the publication that the policy follows; None without one.
        saves: Resources that it can save: the time or the memory of a step, or steps.
        work: Multiplications of a step, forward and backward, in the linears at which it decides, over those of dense:
            a Python expression in the policy's numeric options, for the default values of the others. N, D and O are
            rows, inputs and outputs of a linear; ``trained`` is the share of weights that are trained, ``carried`` that
            of rows with a backward, ``computed`` that of rows that are computed. Empty if there is no formula.
        memory: Tensors that are kept for the backward, in words or as a formula.
        claimed: The publication's claim, and on what it was measured.
        measured: Results with SparseBP, and on which page they are.
        code: The official code, its licence, and what is wrong with it; none of it is copied.
    """

    use: str
    year: int | None = None
    saves: tuple[Saving, ...] = ()
    work: str = ""
    memory: str = ""
    claimed: str = ""
    measured: str = ""
    code: str = ""
