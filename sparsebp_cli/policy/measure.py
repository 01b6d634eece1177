"""What a policy with state may measure: what a step comes by, and the numbers that the policy makes of it.

The engine shows a policy each gradient, input or score that it ``observes``, where and when it has it; the policy's
``measure`` returns numbers by names of its own, and the engine folds those of one place over the step. So what one
method alone needs is a line of that method.

Shape letters: B examples, T positions, N rows (= B*T), O output width, D input width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy.example import Examples
    from sparsebp_cli.policy.informed import Seen
    from sparsebp_cli.policy.token import Tokens


@dataclass(frozen=True)
class Measure:
    """A number or tensor that a policy measured, on the device.

    Args:
        value: A tensor of the same shape wherever measures of one name and place are added.
        fold: Combination of the measures of one name and place in a step, over micro-batches and uses: the ``last``
            one, their ``sum``, or the root of the sum of their squares, ``hypot``, as of norms.
    """

    value: Tensor
    fold: Literal["last", "sum", "hypot"] = "last"


@dataclass(frozen=True)
class Observed:
    """Something that a policy may measure. No tensor of it may be changed.

    Gradients are without the loss scale, in float32 at least if there is one; what a policy measures of them that is
    not finite becomes 0.

    Args:
        name: Name of the place, under which the observation has the measures.
    """

    is_gradient: ClassVar[bool] = True
    name: str


@dataclass(frozen=True)
class ParameterGradient(Observed):
    """The gradient that the optimizer gets of a trained parameter, after clipping; in trial passes as it arrived.

    Args:
        name: Name of the parameter; a shared one has one gradient, by its first name.
        gradient: The gradient, in the shape of the parameter.
    """

    gradient: Tensor


@dataclass(frozen=True)
class SiteGradient(Observed):
    """The gradient of the output of one of a gradient selector's sites, before anything is cut.

    Args:
        name: Name of the site.
        shown: The gradient, (N, O), and what the policy's ``reads`` name.
    """

    shown: Seen


@dataclass(frozen=True)
class LayerGradient(Observed):
    """The gradient at a layer's output, by example, for a :class:`~sparsebp_cli.policy.LayerSampler`.

    Args:
        name: Number of the layer.
        norm_B: The 2-norm of each example's gradient.
    """

    norm_B: Tensor


@dataclass(frozen=True)
class ReaderGradients(Observed):
    """The gradients of the weights of all linears that read one input, for an
    :class:`~sparsebp_cli.policy.InputSaver`, in trial passes alone.

    Args:
        name: Name of the linear that reads the input first.
        gradients: Gradients of the weights by linear, in the order of their names, in the shapes of the weights.
        num_entries: Number of entries of the input, N times D.
    """

    gradients: Mapping[str, Tensor]
    num_entries: int


@dataclass(frozen=True)
class LinearInput(Observed):
    """The input of a linear in a forward, for an :class:`~sparsebp_cli.policy.InputSaver`; of linears that read one
    tensor, the first. A forward that is computed again shows it again.

    Args:
        name: Name of the linear.
        x_ND: The input, all leading dimensions flattened to rows.
    """

    is_gradient: ClassVar[bool] = False
    x_ND: Tensor


@dataclass(frozen=True)
class ReadExamples(Observed):
    """The examples of a forward, for an :class:`~sparsebp_cli.policy.ExampleSelector` what it chooses among, for an
    :class:`~sparsebp_cli.policy.EpochSelector` what a micro-batch was trained on.

    Args:
        name: Number of the forward within the step, from "0".
        examples: The batch, with the scores that the policy has read.
    """

    is_gradient: ClassVar[bool] = False
    examples: Examples


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
    """What a policy measured of one optimizer step, or of one trial pass: by name of the measure, by place.

    A measure that nothing was seen of is empty. Read values by tensor operations alone: a conversion to a number waits
    for the device.
    """

    def __missing__(self, measure: str) -> dict[str, Tensor]:
        return {}

    def add(self, place: str, measures: Mapping[str, Measure]) -> None:
        """Fold the measures of a place into those before.

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
