"""Measures of a policy with state: the objects that it can observe in a step, and the numbers that it computes.

The engine calls the policy's ``measure`` with each gradient, input or score of a class that the policy ``observes``.
``measure`` returns numbers under names that the policy chooses. The engine folds the numbers of one name and place over
the step.

Shape letters: B examples, T positions, N rows (= B*T), O output width, D input width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy.informed import Seen
    from sparsebp_cli.policy.token import Tokens


@dataclass(frozen=True)
class Measure:
    """A number or tensor that a policy measured. It stays on its device.

    Args:
        value: A tensor. All measures of one name and place have the same shape.
        fold: How the engine combines measures of one name and place over a step's micro-batches and calls: the
            ``last`` one, their ``sum``, or ``hypot``, the root of the sum of squares.
    """

    value: Tensor
    fold: Literal["last", "sum", "hypot"] = "last"


@dataclass(frozen=True)
class Observed:
    """An object that a policy may measure. The policy must not change its tensors.

    Gradients do not contain the loss scale; with a loss scale they are at least float32. The engine replaces measures
    of gradients that are not finite by 0.

    Args:
        name: Name of the place, which is the measures' key in the observation.
    """

    is_gradient: ClassVar[bool] = True
    name: str


@dataclass(frozen=True)
class ParameterGradient(Observed):
    """The gradient of a trained parameter, as the optimizer receives it after clipping; in trial passes unclipped.

    Args:
        name: Name of the parameter; the first name of a shared parameter, which has one gradient.
        gradient: The gradient, in the shape of the parameter.
    """

    gradient: Tensor


@dataclass(frozen=True)
class SiteGradient(Observed):
    """The gradient of the output of one of a gradient selector's sites, before the selection.

    Args:
        name: Name of the site.
        shown: The gradient, (N, O), and the tensors that the policy's ``reads`` name.
    """

    shown: Seen


@dataclass(frozen=True)
class LayerGradient(Observed):
    """The gradient at a layer's output, by example, for a policy that chooses examples there.

    Args:
        name: Number of the layer.
        norm_B: The 2-norm of each example's gradient.
    """

    norm_B: Tensor


@dataclass(frozen=True)
class ReadTokens(Observed):
    """The tokens of a forward among which a :class:`~sparsebp_cli.policy.TokenSelector` chooses.

    Args:
        name: Number of the forward within the step, from "0".
        tokens: The batch, with the scores that the policy has read.
    """

    is_gradient: ClassVar[bool] = False
    tokens: Tokens


class Observation(dict[str, dict[str, "Tensor"]]):
    """The measures of an optimizer step or a trial pass, by name and then by place.

    A missing name returns an empty mapping. Read values by tensor operations alone: a conversion to a number waits for
    the device.
    """

    def __missing__(self, measure: str) -> dict[str, Tensor]:
        return {}

    def add(self, place: str, measures: Mapping[str, Measure]) -> None:
        """Fold the measures of a place into its earlier measures.

        Args:
            place: Name of the site, parameter, block, layer or forward.
            measures: Measures by the policy's own names.
        """
        for name, measure in measures.items():
            values = self.setdefault(name, {})
            before = values.get(place)
            values[place] = measure.value if before is None else _FOLDS[measure.fold](before, measure.value)


_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": lambda _, now: now,
    "sum": add,
    "hypot": lambda before, now: before.hypot(now),
}
