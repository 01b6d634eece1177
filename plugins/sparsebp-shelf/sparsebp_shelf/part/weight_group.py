"""Group weights that share one choice, and divide each into units: rows, columns, square blocks or single entries.

Shape letters: O output width, D input width, C units of a weight or a group, K kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from sparsebp_cli.errors import PolicyError, did_you_mean
from sparsebp_cli.policy import Observation, choice
from sparsebp_shelf.part.kind import TrainedWeight
from sparsebp_shelf.part.weight_part import WeightBlocks, WeightColumns, WeightElements, WeightPart, WeightRows

if TYPE_CHECKING:
    from torch import Generator, Tensor

Kind = Literal["rows", "columns", "blocks", "elements"]
KINDS: tuple[Kind, ...] = ("rows", "columns", "blocks", "elements")


@dataclass(frozen=True)
class DividedWeight:
    """A weight and the kind of its units."""

    weight: TrainedWeight
    kind: Kind
    block_size: int  # of blocks

    @property
    def number(self) -> int:
        """C, the number of units. Raises :class:`PolicyError` if the weight does not consist of whole blocks."""
        num_outputs, num_inputs = self.weight.num_outputs, self.weight.num_inputs
        if self.kind == "blocks":
            for width, what in ((num_outputs, "outputs"), (num_inputs, "inputs")):
                if width % self.block_size:
                    raise PolicyError(
                        f"blocks: {self.weight.name!r} has {width} {what}, which must be a multiple of "
                        f"block_size {self.block_size}"
                    )
        sizes: dict[Kind, int] = {
            "rows": num_outputs,
            "columns": num_inputs,
            "blocks": num_outputs * num_inputs // self.block_size**2,
            "elements": num_outputs * num_inputs,
        }
        return sizes[self.kind]

    def sum_units(self) -> Tensor:
        """Return the sum over each unit of the matrix, (C,)."""
        matrix_OD = self.weight.matrix_OD
        if self.kind == "elements":
            return matrix_OD.reshape(-1)
        if self.kind == "blocks":
            return choice.sum_blocks(matrix_OD, (self.block_size, self.block_size)).reshape(-1)
        return matrix_OD.sum(1 if self.kind == "rows" else 0)

    def part(self, index_K: Tensor) -> WeightPart:
        """Return the part that consists of some units."""
        index_K = index_K.to(self.weight.matrix_OD.device)
        if self.kind == "blocks":
            return WeightBlocks(index_K, self.weight.num_inputs, self.block_size)
        if self.kind == "elements":
            return WeightElements(index_K, self.weight.num_inputs)
        return (WeightRows if self.kind == "rows" else WeightColumns)(index_K)


@dataclass(frozen=True)
class WeightGroup:
    """Weights that share one choice."""

    members: tuple[DividedWeight, ...]
    is_joint: bool  # whether all weights have the same units; otherwise their units compete

    @property
    def name(self) -> str:
        """Name of the first weight, under which the choice is drawn and stored."""
        return self.members[0].weight.name

    @property
    def number(self) -> int:
        """C. Raises :class:`PolicyError` if weights that share units have different numbers of them."""
        numbers = [member.number for member in self.members]
        if not self.is_joint:
            return sum(numbers)
        if len(set(numbers)) > 1:
            widths = ", ".join(f"{n} of {each.weight.name!r}" for n, each in zip(numbers, self.members, strict=True))
            raise PolicyError(f"coupled: the rows and columns of a module's weights must be equally many, got {widths}")
        return numbers[0]

    def find_largest(self, keep: float) -> Tensor:
        """Return the numbers of the units with the largest sums, a fraction ``keep``, ascending; first of equals."""
        import torch

        num_kept = self._count(keep)  # first, because it refuses weights with unequal units
        sums = [member.sum_units() for member in self.members]
        sum_C = torch.stack(sums).sum(0) if self.is_joint else torch.cat(sums)
        return sum_C.argsort(descending=True, stable=True)[:num_kept].sort().values

    def draw(self, keep: float, generator: Generator) -> Tensor:
        """Return the numbers of a random fraction ``keep`` of the units, ascending."""
        import torch

        return torch.randperm(self.number, generator=generator)[: self._count(keep)].sort().values

    def spread(self, keep: float) -> Tensor:
        """Return the numbers of an evenly spread fraction ``keep`` of the units, ascending."""
        import torch

        return torch.arange(self._count(keep)) * self.number // self._count(keep)

    def _count(self, keep: float) -> int:
        return choice.count_kept(keep, self.number)

    def split(self, index_K: Tensor) -> Iterator[tuple[str, WeightPart]]:
        """Yield the name and part of each weight that has any of the chosen units."""
        start = 0
        for member in self.members:
            own_K = index_K
            if not self.is_joint:
                end = start + member.number
                own_K = index_K[(index_K >= start) & (index_K < end)] - start
                start = end
            if own_K.numel():
                yield member.weight.name, member.part(own_K)


def group_weights(
    weights: Sequence[TrainedWeight],
    patterns: Mapping[Kind, Sequence[str]],
    block_size: int,
    *,
    coupled: bool = False,
    whole: bool = False,
) -> list[WeightGroup]:
    """Return the groups of the weights that patterns name, in the model's order.

    Args:
        weights: The weights of the model's linears that can be trained in part.
        patterns: Globs over names, by kind of unit; without any, all weights consist of rows.
        block_size: Side of a block.
        coupled: Whether the weights of one parent module share their units.
        whole: Whether the units of all weights compete; otherwise each weight's units compete among themselves.

    Returns:
        The groups. Raises :class:`PolicyError` if a pattern matches nothing, if two patterns name a weight, or if a
        coupled weight has no partner.
    """
    members: dict[str, list[DividedWeight]] = {}
    kinds = _match([weight.name for weight in weights], patterns)
    for weight in weights:
        if weight.name in kinds:
            parent = weight.name.rpartition(".")[0]
            key = "" if whole else parent if coupled else weight.name
            members.setdefault(key, []).append(DividedWeight(weight, kinds[weight.name], block_size))
    for group in members.values():
        if coupled and len({member.kind for member in group}) == 1:
            other = "columns" if group[0].kind == "rows" else "rows"
            raise PolicyError(
                f"coupled: {group[0].weight.name!r} is alone: the option {other} must name another linear layer of "
                "the same module"
            )
    return [WeightGroup(tuple(group), not whole) for group in members.values()]


def sum_magnitudes(observations: Sequence[Observation]) -> list[TrainedWeight]:
    """Return the sum of the magnitudes of each weight's gradients, in the form of weights."""
    sums: dict[str, Tensor] = {}
    for observation in observations:
        for name, magnitude_OD in observation["magnitude"].items():
            sums[name] = sums[name] + magnitude_OD if name in sums else magnitude_OD
    return [TrainedWeight(name, None, sum_OD) for name, sum_OD in sums.items()]


def _match(names: Sequence[str], patterns: Mapping[Kind, Sequence[str]]) -> dict[str, Kind]:
    if not any(patterns.values()):
        return dict.fromkeys(names, "rows")
    kinds: dict[str, Kind] = {}
    for kind, given in patterns.items():
        for pattern in given:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise PolicyError(
                    f"{kind}: {pattern!r} matches no linear layer whose weight can be trained in "
                    f"part{did_you_mean(pattern, names)}"
                )
            for name in matched:
                if kinds.setdefault(name, kind) != kind:
                    raise PolicyError(
                        f"{name!r} matches both {kinds[name]} and {kind}, but a linear layer may match only one of them"
                    )
    return kinds
