"""The card of a method: what a researcher wants to know before trying it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Saving = Literal["time", "memory", "steps"]


@dataclass(frozen=True)
class MethodCard:
    """Use, source, costs and claims of a policy, which ``sparsebp policies`` and the reference show. Only ``use`` is
    required.

    Args:
        use: One or two sentences: when to use it, and when not.
        year: Year of the publication that the policy follows; None without one.
        saves: Resources that it can save: the time or the memory of a step, or steps.
        work: Multiplications of a step, forward and backward, in the linears at which it decides, over the dense
            number; the mean over steps and linears with ``budget_at``. A Python expression in the policy's numeric
            options, at the defaults of its other options. N, D and O are rows, inputs and outputs of a linear.
            ``trained`` is the fraction of weights that are trained, ``carried`` of rows with a backward, ``computed``
            of rows that are computed. Empty if there is no formula.
        memory: Tensors that are saved for the backward, in words or as a formula.
        claimed: The publication's claim, and the setting of its measurement.
        measured: Results with SparseBP, and their page.
        code: The official code, its licence, and its errors. SparseBP copies none of it.
    """

    use: str
    year: int | None = None
    saves: tuple[Saving, ...] = ()
    work: str = ""
    memory: str = ""
    claimed: str = ""
    measured: str = ""
    code: str = ""
