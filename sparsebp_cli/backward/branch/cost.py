"""What one branch's backward costs, dense and with a share of its rows, as FLOPs from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor, nn

from sparsebp_cli.backward.branch.stored_outputs import is_again
from sparsebp_cli.backward.core.report import FlopEstimate
from sparsebp_cli.policy import Rows, Selection

if TYPE_CHECKING:
    from sparsebp_cli.backward.branch.branch import Branch


@dataclass(frozen=True)
class BranchCost:
    """dgrad and wgrad of a branch's linears and, in an attention, of its products; see
    :class:`sparsebp_cli.backward.core.extension.SiteCost`.

    Args:
        branch: The branch.
        form: ``masked``: as autograd does it; ``stored`` or ``again``: the kept rows alone, with the linears' outputs
            kept or multiplied again; ``whole``: all is computed again.
        batch_shape: The output's shape without features.
        input_needs_grad: Whether the core's input does: not, where nothing before it is trained.
    """

    branch: Branch
    form: Literal["masked", "stored", "again", "whole"]
    batch_shape: tuple[int, ...]
    input_needs_grad: bool = True

    @property
    def pads(self) -> bool:
        """Whether every example multiplies as many queries as the one that keeps most."""
        return self.branch.attention is not None and self.form in ("stored", "again")

    def claim(self, selection: type[Selection] | None, budget: float) -> FlopEstimate:
        """Return the dense work, and what is left of it.

        Args:
            selection: The kind; None: dense.
            budget: Share of rows that is kept, in (0, 1].

        Returns:
            Dense and claimed; what is computed again counts as claimed.
        """
        share = budget if selection is Rows and self.form in ("stored", "again") else 1.0
        runs = self.form != "masked"
        dense = claimed = 0.0
        for linear in self._linears():
            dense += linear.backward
            again = linear.again * linear.forward * runs
            if linear.by_rows or not runs:
                claimed += (linear.backward + again) * share
            else:  # all positions get gradients through keys and values
                claimed += linear.backward + again + (linear.backward + again) * share * linear.fused
        forward, backward = self._products()
        dense += backward
        claimed += (forward + backward) * share if runs else backward
        return FlopEstimate(dense, claimed)

    def _linears(self) -> Iterator[_Linear]:
        attention, num_rows = self.branch.attention, prod(self.batch_shape)
        for name, module, _ in self.branch.linears:
            weight = cast("Tensor", module.weight)
            flops = 2.0 * num_rows * weight.numel()
            yield _Linear(
                forward=flops,
                backward=flops * (self.input_needs_grad or not self._reads_input(name)) + flops * weight.requires_grad,
                again=is_again(self.branch, name, stores=self.form == "stored", whole=self.form == "whole"),
                by_rows=attention is None or name.partition(".")[0] not in attention.key_value,
                fused=attention is not None and attention.fused and self.form != "whole",
            )

    def _reads_input(self, name: str) -> bool:
        """Whether a linear reads the core's input, and not what a trained linear made of it."""
        return name.partition(".")[0] != self.branch.last and ".lora_B." not in name

    def _products(self) -> tuple[float, float]:
        """Queries times keys and probabilities times values: 4 B T T D forward, 8 B T T D backward, and 10 where a
        fused kernel multiplies the first again, as counted."""
        if self.branch.attention is None or len(self.batch_shape) != 2:
            return 0.0, 0.0
        (num_examples, num_positions), width = self.batch_shape, _attention_width(self.branch)
        square = float(num_examples * num_positions * num_positions * width)
        eager = self.branch.core.config._attn_implementation == "eager"  # type: ignore[union-attr]  # noqa: SLF001 - as cores do
        return 4.0 * square, (8.0 if eager else 10.0) * square


@dataclass(frozen=True)
class _Linear:
    forward: float
    backward: float
    again: bool
    by_rows: bool
    fused: bool


def _attention_width(branch: Branch) -> int:
    """Heads times width of a head: what the output projection reads."""
    assert branch.attention is not None
    output: nn.Module = getattr(branch.core, branch.last)
    return int(output.nx if hasattr(output, "nx") else output.in_features)  # type: ignore[arg-type]
