"""FLOPs of one branch's backward, dense and for a share of its rows, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from torch import nn

from sparsebp_cli.backward.branch.stored_outputs import is_recomputed
from sparsebp_cli.backward.core.report import FlopEstimate
from sparsebp_cli.backward.decoder.decoder import attention_name
from sparsebp_cli.backward.linear.function import weight_of
from sparsebp_cli.policy import Rows, Selection

if TYPE_CHECKING:
    from sparsebp_cli.backward.branch.branch import Branch


@dataclass(frozen=True)
class BranchCost:
    """dgrad and wgrad of a branch's linears and of its attention products, as a
    :class:`sparsebp_cli.backward.core.extension.SiteCost`.
    """

    branch: Branch
    # masked: the ordinary backward; stored, again: the kept rows alone, with outputs of linears stored or multiplied
    # again; whole: every row is recomputed.
    form: Literal["masked", "stored", "again", "whole"]
    batch_shape: tuple[int, ...]  # of the output, without features
    input_needs_grad: bool = True  # False where nothing before the core is trained

    @property
    def pads(self) -> bool:
        """Whether every example multiplies as many queries as the example that keeps most."""
        return self.branch.attention is not None and self.form in ("stored", "again")

    def claim(self, selection: type[Selection] | None, budget: float) -> FlopEstimate:
        """Return the dense work and the claimed part of it; recomputed forward work counts as claimed."""
        share = budget if selection is Rows and self.form in ("stored", "again") else 1.0
        runs = self.form != "masked"
        dense = claimed = 0.0
        for linear in self._linears():
            dense += linear.backward
            again = linear.recomputes * linear.forward * runs
            if linear.by_rows or not runs:
                claimed += (linear.backward + again) * share
            else:  # keys and values of every position get gradients
                claimed += linear.backward + again + (linear.backward + again) * share * linear.fused
        forward, backward = self._products()
        dense += backward
        claimed += (forward + backward) * share if runs else backward
        return FlopEstimate(dense, claimed)

    def _linears(self) -> Iterator[_Linear]:
        attention, num_rows = self.branch.attention, prod(self.batch_shape)
        for name, module, form in self.branch.linears:
            weight = weight_of(module)
            flops = 2.0 * num_rows * prod(form.sizes(weight))
            yield _Linear(
                forward=flops,
                backward=flops * (self.input_needs_grad or not self._reads_input(name)) + flops * weight.requires_grad,
                recomputes=is_recomputed(self.branch, name, stores=self.form == "stored", whole=self.form == "whole"),
                by_rows=attention is None or name.partition(".")[0] not in (*attention.key_value, *attention.expands),
                fused=attention is not None and attention.fused and self.form != "whole",
            )

    def _reads_input(self, name: str) -> bool:
        """Whether a linear reads the core's input directly, and not the output of another trained linear."""
        # peft's lora_B reads what lora_A gives, never the core's input.
        return self.branch.last not in name.split(".") and ".lora_B." not in name

    def _products(self) -> tuple[float, float]:
        """Return forward and backward FLOPs of queries times keys and probabilities times values.

        Forward 4 B T T D, backward 8 B T T D; 10 for a fused kernel, which multiplies queries and keys once more.
        """
        if self.branch.attention is None or len(self.batch_shape) != 2:
            return 0.0, 0.0
        (num_examples, num_positions), width = self.batch_shape, _attention_width(self.branch)
        square = float(num_examples * num_positions * num_positions * width)
        eager = attention_name(self.branch.core) in ("eager", None)
        return 4.0 * square, (8.0 if eager else 10.0) * square


@dataclass(frozen=True)
class _Linear:
    forward: float
    backward: float
    recomputes: bool
    by_rows: bool
    fused: bool


def _attention_width(branch: Branch) -> int:
    """Return heads times head width: the input width of the output projection."""
    assert branch.attention is not None
    assert branch.last is not None
    output: nn.Module = getattr(branch.core, branch.last)
    # transformers' Conv1D, as in gpt2, calls its input width nx.
    return int(getattr(output, "nx" if hasattr(output, "nx") else "in_features"))
