"""State of a policy, from one step to the next. The policy computes it, the engine keeps it.

Two pure functions: ``init`` returns the first state, ``observe`` the next one from what a step saw. The engine owns the
value in between: it is saved in checkpoints, moved with the model's device, and set aside by probes.

Shape letters: N rows (= B*T), O output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from sparsebp_cli.policy.contract import State, Step

if TYPE_CHECKING:
    from torch import Tensor

Observed = Literal[
    "grad_norm",
    "column_norm",
    "parameter_norm",
    "parameter_l1",
    "gradient_sample",
    "row_product",
    "example_norm",
    "weight_gradient",
    "reader_gradient",
    "input_entries",
    "input_mean",
    "block_norm",
    "example_loss",
    "example_gradient",
    "example_row",
    "token_loss",
]
Place = TypeVar("Place")  # where the policy decides: a Site, a Parameter, a ResidualBlock


@dataclass(frozen=True)
class Observation:
    """What one optimizer step saw, over all its micro-batches, where a gradient arrived.

    All are in float32 at least, on the device. Read them by tensor operations alone: a conversion to a number waits for
    the device.

    Args:
        grad_norm: By site, the 2-norm of the whole gradient of its output, before anything was cut, 0-d.
        column_norm: By site, the 2-norm of each output feature of that, (O,).
        parameter_norm: By parameter, the 2-norm of the gradient that the optimizer gets, after clipping, 0-d.
        parameter_l1: By parameter, the sum of the magnitudes of that gradient, 0-d. A shared parameter has one
            entry, by its first name.
        gradient_sample: By parameter, one in a hundred entries of its gradient, the same in all trial passes before a
            step, scaled so that the sum of their squares estimates that of all, (K,). In trial passes alone.
        row_product: By site, the product of the norms of each row of input and gradient, (N,); needs ``input_norm``
            among the policy's ``reads``. In trial passes alone.
        example_norm: By number of a layer, the norm of each example's gradient at its output, (B,), of a
            :class:`~sparsebp_cli.policy.LayerSampler`. In trial passes alone.
        weight_gradient: By linear, the gradient of its weight in the weight's own precision, (O, D), of a
            :class:`~sparsebp_cli.policy.PartSelector`. In trial passes alone.
        reader_gradient: By the linear that reads an input first, one in a hundred entries of the gradients of the
            weights of all linears that read it, scaled like ``gradient_sample``, (K,), of an
            :class:`~sparsebp_cli.policy.InputSaver`. In trial passes alone.
        input_entries: By the same linears, the number of entries of their input, 0-d. In trial passes alone.
        input_mean: By the same linears, the mean of the rows of their input in the step's first forward, (D,), of an
            :class:`~sparsebp_cli.policy.InputSaver` without trial passes.
        block_norm: By residual block, the 2-norm of the gradient of what it adds to the residual stream, 0-d, of a
            :class:`~sparsebp_cli.policy.BlockDropper` without trial passes. A block that was dropped at this step has
            no entry; where one module computes several blocks, each has the norm of their sum.
        example_loss: By forward of the step, "0" and on, the losses that an
            :class:`~sparsebp_cli.policy.ExampleSelector` read there, (B,); no entry where it needed none.
        example_gradient: The same of the norms of gradients at the logits, (B,), where the policy reads these.
        example_row: The same of the examples' rows in the training data, (B,), int64, where the policy reads these.
        token_loss: The losses of a :class:`~sparsebp_cli.policy.TokenSelector` that needs ``loss``, (B, T), 0 where
            there is no target.
    """

    grad_norm: Mapping[str, Tensor] = field(default_factory=dict)
    column_norm: Mapping[str, Tensor] = field(default_factory=dict)
    parameter_norm: Mapping[str, Tensor] = field(default_factory=dict)
    parameter_l1: Mapping[str, Tensor] = field(default_factory=dict)
    gradient_sample: Mapping[str, Tensor] = field(default_factory=dict)
    row_product: Mapping[str, Tensor] = field(default_factory=dict)
    example_norm: Mapping[str, Tensor] = field(default_factory=dict)
    weight_gradient: Mapping[str, Tensor] = field(default_factory=dict)
    reader_gradient: Mapping[str, Tensor] = field(default_factory=dict)
    input_entries: Mapping[str, Tensor] = field(default_factory=dict)
    input_mean: Mapping[str, Tensor] = field(default_factory=dict)
    block_norm: Mapping[str, Tensor] = field(default_factory=dict)
    example_loss: Mapping[str, Tensor] = field(default_factory=dict)
    example_gradient: Mapping[str, Tensor] = field(default_factory=dict)
    example_row: Mapping[str, Tensor] = field(default_factory=dict)
    token_loss: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialPass:
    """A trial pass as a policy wants it.

    Args:
        batch: 0 for the step's first micro-batch, 1 for another one, and so on.
        draw: Of random decisions, at least 1; other numbers give independent draws.
        state: The state that the policy's decisions read in it; None: the state before the step.
    """

    batch: int = 0
    draw: int = 1
    state: State | None = None


class Stateful(ABC, Generic[Place]):
    """A policy of any kind with state: derive from this class and from the kind. Its decision reads ``step.state``.

    State is a mapping of names to tensors and numbers, with the same names, shapes and dtypes at every step. The engine
    hands it over sorted by name.
    """

    @property
    def observes(self) -> frozenset[Observed]:
        """Which parts of the :class:`Observation` are to be computed, at the policy's own sites; of
        parameters, at all that are trained. A policy with trial passes observes parameters in those alone."""
        return frozenset()

    @property
    def is_identical(self) -> bool:
        """Whether the state is the same in every process, as one that follows from the steps' numbers alone is.
        Otherwise the policy works in one process: each observes only its own examples."""
        return False

    @abstractmethod
    def init(self, places: Sequence[Place], /) -> State:
        """Return the state before the first step.

        Args:
            places: Where the policy decides: the sites of a gradient selector, with an empty ``batch_shape``, which is
                not known yet; the parameters of a parameter selector; the blocks of a block dropper; the weights of a
                part selector; the linears of an input saver; the rows of the training data, as numbers from 0, of an
                epoch selector, and of an example selector that reads them; otherwise none.

        Returns:
            Tensors on the CPU, and numbers.
        """

    @abstractmethod
    def observe(self, state: State, observation: Observation, step: Step) -> State:
        """Return the state after a step. Called at the end of each optimizer step.

        Args:
            state: Before it. It must not be changed.
            observation: What the step saw.
            step: The step that ended.

        Returns:
            New values for all entries.
        """

    @property
    def has_trials(self) -> bool:
        """Whether ``wants_trials`` asks for any, at whatever step."""
        return False

    def wants_trials(self, step: Step) -> Sequence[Collection[str] | TrialPass]:  # noqa: ARG002 - for overrides
        """Return what is to be tried before a step: decisions, of a block dropper; passes with a state of their own, of
        a layer sampler or an input saver; dense passes, of a part selector.

        Each is one forward and backward over one micro-batch, with the same random numbers of dropout; they cost what
        they cost, and change nothing but the state. Built for these four kinds.

        Args:
            step: The coming one, with the state.

        Returns:
            One entry a pass; empty, as without an override: none.
        """
        return ()

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        """Return the state after the trial passes. Called before the step that they were made for.

        Args:
            state: Before them. It must not be changed.
            observations: What each pass saw, in the order of ``wants_trials``; ``observes`` names the parts.
            step: The coming one.

        Returns:
            New values for all entries.
        """
        return state
