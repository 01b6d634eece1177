"""Puts a policy into a model: finds the sites, and refuses by name what is not built, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsebp_cli.backward.branch.site import BranchAdapter
from sparsebp_cli.backward.core.decision import SiteDecisions
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.extension import EngineExtension, SiteAdapter
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.core.process import SEVERAL, count_processes
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.update import choose_update
from sparsebp_cli.backward.execution.segment.extension import Segments
from sparsebp_cli.backward.linear.float8 import find_float8
from sparsebp_cli.backward.linear.form_choice import FormChoice
from sparsebp_cli.backward.linear.saving import InputSaving, connect
from sparsebp_cli.backward.linear.site import LinearAdapter
from sparsebp_cli.backward.node.router import Routing
from sparsebp_cli.backward.node.site import NodeAdapter
from sparsebp_cli.backward.observe.attribution import is_watched
from sparsebp_cli.backward.packing.extension import PackingExtension
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.backward.selection.block.extension import BlockExtension
from sparsebp_cli.backward.selection.block.layout import find_blocks
from sparsebp_cli.backward.selection.estimate import EstimatorExtension
from sparsebp_cli.backward.selection.example import ExampleExtension
from sparsebp_cli.backward.selection.layer import LayerExtension
from sparsebp_cli.backward.selection.learning_rate import LearningRates
from sparsebp_cli.backward.selection.parameter import ParameterExtension, find_parameters, refuse_lazy
from sparsebp_cli.backward.selection.part import Linears, PartExtension, find_divisible, show_weights
from sparsebp_cli.backward.selection.tile.extension import TileExtension
from sparsebp_cli.backward.selection.token.extension import make_extensions
from sparsebp_cli.backward.selection.token.routing import RoutingExtension
from sparsebp_cli.composition import BackwardChoices, BackwardOptions, PolicyFacts, Setup, refuse
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import (
    BatchPacker,
    BlockDropper,
    EdgeRouter,
    ExampleSelector,
    GradientEstimator,
    GradientSelector,
    InputSaver,
    LayerSampler,
    ParameterSelector,
    PartSelector,
    Policy,
    PolicyLike,
    ReferenceReader,
    Stateful,
    Step,
    TileSelector,
    TokenRouter,
    make_policies,
)
from sparsebp_cli.policy.example import EXAMPLE_ROW
from sparsebp_cli.policy.scheduled_option import needs_length


def attach(  # noqa: PLR0913 - what a training loop may give
    model: nn.Module,
    policies: PolicyLike | Sequence[PolicyLike],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    num_steps: int | None = None,
    num_examples: int | None = None,
    reference: nn.Module | Literal["batch"] | None = None,
    validation: Mapping[str, torch.Tensor] | None = None,
    **choices: Unpack[BackwardChoices],
) -> Engine:
    """Let policies decide about a model's gradients, in any PyTorch loop that calls ``engine.backward(loss)``.

    Args:
        model: Changed in place; ``engine.detach()`` gives it back. Its state_dict keys stay as they are. It may be
            wrapped by DDP or ``torch.compile`` before or afterwards; with gradient policies at linears or branches
            it compiles to one graph (``fullgraph=True``), in which the policies are asked at every backward.
        policies: One or several, each a policy, its name, or a mapping of ``name`` and its options. At most one answers
            each question; none is dense.
        optimizer: Its steps advance ``Step.index``; without it, every backward does.
        max_grad_norm: With ``update="eager"``, what gradients are clipped to, greater than 0; None: no clipping.
        seed: Of random decisions.
        num_steps: Optimizer steps of the whole training; policies with a schedule over all of it need it.
        num_examples: Rows of the training data; policies that keep something for each example need it, and in each
            batch the column ``example_row``, (B,), int64, among the model's arguments.
        reference: A model whose loss of each token a policy compares with; ``batch``: each batch brings that loss as
            ``reference_loss``, (B, T), at the position that predicts the token.
        validation: Examples that are never trained on and with whose gradients a policy compares those of the batch:
            one batch of the model's arguments with ``labels``, from which the policy draws.
        **choices: How the backward pass is executed: the fields of :class:`sparsebp_cli.BackwardOptions`, which a
            recipe has as its section ``backward``: ``execution``, ``sites``, ``exclude``, ``update``, ``eager_clip``,
            ``checkpointing``, ``segments`` and ``time_forms``.

    Returns:
        The engine; as a context manager it detaches at the end.

    Raises:
        PolicyError: A policy's name is unknown, an option of it wrong, or it could keep state by itself.
        UnsupportedError: The combination is not built: a kind of policy, two policies with one question, options that
            exclude each other, or a model that is attached already or offloaded.
        UsageError: A choice is unknown or not allowed, ``exclude`` matches nothing, or the model has no linear.
    """
    policies = make_policies(policies)
    options = BackwardOptions.of(choices)
    clipping = Clipping(max_grad_norm, options.eager_clip)
    chosen = {**dict(options), "max_grad_norm": max_grad_norm, "optimizer": optimizer}
    _refuse_unbuilt(model, policies, chosen)
    selectors = [policy for policy in policies if isinstance(policy, GradientSelector)]
    check_scoring(policies, num_steps, num_examples, reference, validation)
    wrapped, model = model, _unwrap(model)
    _refuse_attached(model)
    refuse_lazy(model)
    layers = LayerNumbers(model)
    savers = [InputSaving(p, model, len(layers.layers)) for p in policies if isinstance(p, InputSaver)]
    decisions = SiteDecisions(selectors, len(layers.layers))
    forms = FormChoice() if options.time_forms else None
    adapter = _make_adapter(model, policies, options, next(iter(savers), None), forms)
    if selectors and adapter.names:  # at nodes they are known after the first backward only
        decisions.check_disjoint(adapter.names, layers.number_of)
    linears = adapter.sites if isinstance(adapter, LinearAdapter) else ()
    if forms is not None and isinstance(adapter, LinearAdapter):
        forms.cover(adapter, selectors, len(layers.layers))
    divisible: Linears = {}
    for policy in policies:
        if isinstance(policy, PartSelector):
            divisible = find_divisible(model, options.exclude, frozen=policy.of_frozen)
    places: _Places = {  # of a policy with state
        GradientSelector: lambda policy: decisions.sites_of(policy, linears),
        InputSaver: lambda _: [site for site in linears if savers[0].scope.contains(site.name, site.layer)],  # the one
        ParameterSelector: lambda _: find_parameters(model)[0],
        PartSelector: lambda _: show_weights(model, divisible),
        ExampleSelector: lambda policy: range(num_examples or 0) if policy.reads_rows else (),
        BlockDropper: lambda policy: find_blocks(model, type(policy).__name__)[0],
    }
    states = PolicyStates(
        [(policy, _find_places(policy, places)) for policy in policies],
        lambda: {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )
    connect(savers, states, optimizer)
    given = _Given(
        states,
        optimizer,
        Step(0, seed=seed, num_steps=num_steps),
        divisible,
        num_examples,
        reference,
        validation,
        options.exclude,
    )
    tokens = make_extensions(policies, model, reference, states)
    eager = choose_update(wrapped, optimizer, options.update, clipping)
    attached = Engine(
        adapter,
        decisions,
        model=model,
        optimizer=optimizer,
        reference=options.execution == "reference",
        stores=options.checkpointing == "none",
        seed=seed,
        num_steps=num_steps,
        states=states,
        extensions=[
            *tokens,
            *savers,
            *(
                make(policy, model, given)
                for kind, make in _EXTENSIONS.items()
                for policy in policies
                if isinstance(policy, kind)
            ),
            *eager,
            *(
                LearningRates(policy, model, states, optimizer)
                for policy in policies
                if isinstance(policy, ParameterSelector) and policy.sets_rates and optimizer is not None
            ),
            *([] if options.segments is None else [Segments(model, options.segments)]),
            *([] if forms is None else [forms]),
        ],
    )
    if any(_names_layers(policy) for policy in policies):
        attached.notes["layers"] = layers.describe()
    return attached


def _make_adapter(
    model: nn.Module,
    policies: Sequence[Policy],
    options: BackwardOptions,
    saving: InputSaving | None,
    forms: FormChoice | None,
) -> SiteAdapter:
    """Return what installs the engine at the sites that the policies and options ask for."""
    router = next((policy for policy in policies if isinstance(policy, EdgeRouter)), None)
    if router is not None:
        return NodeAdapter(model, options.exclude, Routing(router))
    if options.sites != "linears":
        return (BranchAdapter if options.sites == "branches" else NodeAdapter)(model, options.exclude)
    if any(isinstance(policy, GradientSelector) for policy in policies):
        return LinearAdapter(model, options.exclude, forms=forms)
    acts_before = bool(policies) and all(isinstance(policy, _ACT_BEFORE) for policy in policies)
    # Without a saver it may be a model without a linear, such as a convolutional one.
    return LinearAdapter(
        model, options.exclude, may_be_empty=saving is None, installs=not acts_before, saving=saving, forms=forms
    )


def _find_places(policy: Policy, places: _Places) -> Sequence[object]:
    """Return where a policy with state decides."""
    if not isinstance(policy, Stateful):
        return ()
    return next((find(policy) for kind, find in places.items() if isinstance(policy, kind)), ())


def _names_layers(policy: Policy) -> bool:
    if isinstance(policy, GradientSelector | InputSaver):
        return policy.layers is not None
    return isinstance(policy, ParameterSelector) and policy.changes


_Places: TypeAlias = Mapping[Any, Callable[[Any], Sequence[object]]]  # by kind, of one policy
# No site decides or counts.
_ACT_BEFORE = (BatchPacker, BlockDropper, GradientEstimator, PartSelector, TileSelector, TokenRouter)


class _Given(NamedTuple):
    """What extensions share with the engine."""

    states: PolicyStates
    optimizer: torch.optim.Optimizer | None
    first: Step
    divisible: Linears  # of whose weights parts can be trained
    num_examples: int | None  # rows of the training data
    reference: nn.Module | str | None  # as attach takes it
    validation: Mapping[str, torch.Tensor] | None
    exclude: Sequence[str]

    @property
    def trained_by(self) -> torch.optim.Optimizer:
        """The optimizer, of policies that are refused without one."""
        assert self.optimizer is not None
        return self.optimizer


# Who carries out the policies that are not asked at sites, in the order in which they change the model.
_EXTENSIONS: dict[Any, Callable[[Any, nn.Module, _Given], EngineExtension]] = {
    ParameterSelector: lambda policy, model, given: ParameterExtension(
        policy, model, given.states, given.optimizer, given.first
    ),
    BlockDropper: lambda policy, model, given: BlockExtension(policy, model, given.states),
    BatchPacker: lambda policy, model, _: PackingExtension(policy, model),
    ExampleSelector: lambda policy, model, given: ExampleExtension(
        policy,
        model,
        given.states,
        num_examples=given.num_examples,
        reference=given.reference if isinstance(given.reference, nn.Module) else None,
        validation=given.validation,
        optimizer=given.optimizer,
        exclude=given.exclude,
    ),
    LayerSampler: lambda policy, model, given: LayerExtension(policy, model, given.states),
    GradientEstimator: lambda policy, model, _: EstimatorExtension(policy, model),
    TokenRouter: lambda policy, model, _: RoutingExtension(policy, model),
    TileSelector: lambda policy, model, _: TileExtension(policy, model),
    PartSelector: lambda policy, model, given: PartExtension(
        policy, model, given.divisible, given.states, given.trained_by, given.first
    ),
}


def _unwrap(model: nn.Module) -> nn.Module:
    """Return what DDP and ``torch.compile`` have wrapped: the names of its modules are those of sites and patterns."""
    while True:
        name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        inner = dict(model.named_children()).get(name)
        if inner is None:
            return model
        model = inner


def _refuse_attached(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), ForwardOverride) or is_watched(module):
            where = f" (at {name!r})" if name else ""
            raise UnsupportedError(f"the model is already attached{where}: call detach() of its engine first")


def _refuse_unbuilt(model: nn.Module, policies: Sequence[Policy], chosen: dict[str, Any]) -> None:
    """Hold what the user chose against the table of what goes with what."""
    float8 = find_float8(model)
    wrapped = "compiled" if "_orig_mod" in dict(model.named_children()) else None
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        wrapped = "DDP"
    processes = count_processes(model)
    facts = {**chosen, "float8": float8, "wrapped": wrapped, "processes": processes, "loop": "own"}
    words = {"processes": SEVERAL, "float8": f"float8 linears (at {float8!r})"}
    refuse(Setup([PolicyFacts.of(policy) for policy in policies], facts, words=words))


BATCH = "batch"


def check_scoring(
    policies: Sequence[Policy],
    num_steps: int | None,
    num_examples: int | None,
    reference: nn.Module | str | None,
    validation: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Refuse a policy without what it chooses by, and a reference or validation examples that nobody reads.

    Args:
        policies: All that are to be attached.
        num_steps: Optimizer steps of the whole training; None: nobody told.
        num_examples: Rows of the training data; None: nobody told.
        reference: A model; ``batch``: its scores come with each batch.
        validation: One batch of examples with their labels; None: there are none.

    Raises:
        UsageError: Something is missing, or given for nothing.
    """
    for policy in policies:
        needs_length(policy, num_steps)
        if isinstance(policy, ExampleSelector) and policy.needs_num_steps and num_steps is None:
            name = type(policy).__name__
            raise UsageError(f"{name}: start and end are shares of the training: give attach(num_steps=...)")
        if isinstance(policy, ExampleSelector) and policy.reads_rows and num_examples is None:
            raise UsageError(
                f"{type(policy).__name__} keeps something for each example of the data: give attach(num_examples=...), "
                f"and each batch the column {EXAMPLE_ROW!r}; data without rows, such as a stream, do not go with it"
            )
        if isinstance(policy, TokenRouter) and policy.needs_num_steps and num_steps is None:
            name = type(policy).__name__
            raise UsageError(f"{name}: its number of positions grows over the training: give attach(num_steps=...)")
    readers = [p for p in policies if isinstance(p, ReferenceReader) and p.reads_reference]
    if readers and reference is None:
        raise UsageError(
            f"{type(readers[0]).__name__} compares with a reference: give attach(reference=MODEL), or "
            f"reference={BATCH!r} where each batch has a column reference_loss"
        )
    if isinstance(reference, str) and reference != BATCH:
        raise UsageError(f"reference must be a model or {BATCH!r}, got {reference!r}")
    if reference is not None and not readers:
        raise UsageError("reference is given, and no policy compares with one")
    _check_validation(policies, validation)


def validates(policy: Policy) -> bool:
    """Return whether a policy compares gradients with those of validation examples.

    Args:
        policy: With its options.

    Returns:
        Whether it does.
    """
    return isinstance(policy, ExampleSelector) and policy.num_validation > 0


def _check_validation(policies: Sequence[Policy], validation: Mapping[str, torch.Tensor] | None) -> None:
    readers = [policy for policy in policies if isinstance(policy, ExampleSelector) and validates(policy)]
    if validation is None:
        if readers:
            raise UsageError(
                f"{type(readers[0]).__name__} compares gradients with those of validation examples: give "
                "attach(validation=...), a batch of examples with labels that is never trained on"
            )
        return
    if not readers:
        raise UsageError("validation is given, and no policy compares with validation examples")
    if "labels" not in validation:
        raise UsageError(f"validation must have labels, got {', '.join(sorted(validation)) or 'nothing'}")
    number, most = len(validation["labels"]), max(policy.num_validation for policy in readers)
    if number < most:
        raise UsageError(
            f"validation must have {most} examples or more, as {type(readers[0]).__name__} draws, got {number}"
        )
