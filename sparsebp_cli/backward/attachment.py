"""Puts a policy into a model: finds the sites, and refuses by name what is not built, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from sparsebp_cli.backward.branch.site import BranchAdapter
from sparsebp_cli.backward.core.decision import SiteDecisions
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.extension import EngineExtension, SiteAdapter
from sparsebp_cli.backward.core.given import FindPlaces, Given, MakeExtension
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.core.process import SEVERAL, count_processes
from sparsebp_cli.backward.core.scope import Scope
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.update import choose_update
from sparsebp_cli.backward.execution.segment.extension import Segments
from sparsebp_cli.backward.kind.fused_head import has_fused_head
from sparsebp_cli.backward.linear.float8 import find_float8
from sparsebp_cli.backward.linear.quantized import find_quantized
from sparsebp_cli.backward.linear.saving import InputSaving, connect
from sparsebp_cli.backward.linear.site import LinearAdapter
from sparsebp_cli.backward.node.site import NodeAdapter
from sparsebp_cli.backward.observe.attribution import is_watched
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.composition import BackwardChoices, BackwardOptions, PolicyFacts, Setup, refuse
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import (
    BatchPacker,
    GradientSelector,
    InputSaver,
    Policy,
    PolicyLike,
    ReferenceReader,
    Stateful,
    Step,
    make_policies,
)
from sparsebp_cli.policy.example import EXAMPLE_ROW
from sparsebp_cli.policy.kind import Kind, load
from sparsebp_cli.policy.known_kind import find_aspects, find_facts, find_kind, list_kinds
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
    folder: str | Path | None = None,
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
        max_grad_norm: With ``update="eager"``, the 2-norm to which gradients are clipped, greater than 0; None: no
            clipping.
        seed: Seed of random decisions, each of which depends on it, the step, the site and the process.
        num_steps: Optimizer steps of the whole training; policies with a schedule over all of it need it.
        num_examples: Rows of the training data; policies that keep something for each example need it, and in each
            batch the column ``example_row``, (B,), int64, among the model's arguments.
        reference: A model whose loss of each token a policy compares with; ``batch``: each batch brings that loss as
            ``reference_loss``, (B, T), at the position that predicts the token. Beside ``lossless``, the model of your
            own loss that runs the same batches without a gradient, whose rows are left out as well.
        validation: Examples that are never trained on and with whose gradients a policy compares those of the batch:
            one batch of the model's arguments with ``labels``, from which the policy draws.
        folder: The training's own folder, in which a policy keeps on disk what the next visit of an example, or the
            next process, need not compute again. All of that may be deleted between two trainings.
        **choices: How the backward pass is executed: the fields of :class:`sparsebp_cli.BackwardOptions`, which a
            recipe has as its section ``backward``: ``execution``, ``sites``, ``exclude``, ``update``, ``eager_clip``,
            ``checkpointing``, ``segments``.

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
    inner = refuse_model(model, policies, chosen)
    selectors = [policy for policy in policies if isinstance(policy, GradientSelector)]
    check_scoring(policies, num_steps, num_examples, reference, validation)
    wrapped, model = model, inner
    layers = LayerNumbers(model)
    decisions = SiteDecisions(selectors, len(layers.layers))
    adapter = _make_adapter(model, policies, options)
    if selectors and adapter.names:  # at nodes they are known after the first backward only
        savers = [(policy, Scope(policy, len(layers.layers))) for policy in policies if isinstance(policy, InputSaver)]
        decisions.check_disjoint(adapter.names, layers.number_of, savers)
    given = Given(
        optimizer=optimizer,
        first=Step(0, seed=seed, num_steps=num_steps),
        num_layers=len(layers.layers),
        linears=adapter.sites if isinstance(adapter, LinearAdapter) else (),
        num_examples=num_examples,
        reference=reference,
        validation=validation,
        exclude=options.exclude,
        packs=_packs(policies),
        folder=None if folder is None else Path(folder),
    )
    states = PolicyStates(
        [(policy, _find_places(policy, model, decisions, given)) for policy in policies],
        # A function: `.grad` is another tensor at each step.
        lambda: {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )
    given = replace(given, states=states)
    extensions = _make_extensions(policies, model, given)
    savings = [extension for _, extension in extensions if isinstance(extension, InputSaving)]
    # An optimizer with moments of projections has to draw those of the saver. See decision 18.
    connect(savings, optimizer)
    for saving in savings:
        assert isinstance(adapter, LinearAdapter), "refused at other sites"
        adapter.save_by(saving)
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
        # By their numbers and not by their place, since an override wraps the forward that it finds. See decision 29.
        extensions=[
            *(extension for number, extension in extensions if number < Kind.EAGER_UPDATE),
            *choose_update(wrapped, optimizer, options.update, clipping),
            *(extension for number, extension in extensions if number >= Kind.EAGER_UPDATE),
            *([] if options.segments is None else [Segments(model, options.segments)]),
        ],
    )
    if any(find_facts(policy).get("names_layers") for policy in policies):
        attached.notes["layers"] = layers.describe()
    return attached


def _make_adapter(model: nn.Module, policies: Sequence[Policy], options: BackwardOptions) -> SiteAdapter:
    """Return what installs the engine at the sites that the policies and options ask for."""
    kinds = list_kinds(policies)
    for policy, kind in zip(policies, kinds, strict=True):
        if kind.adapter:
            adapter: SiteAdapter = load(kind.adapter)(policy, model, Given(exclude=options.exclude))
            return adapter
    if options.sites != "linears":
        return (BranchAdapter if options.sites == "branches" else NodeAdapter)(model, options.exclude)
    # A model without a linear, such as a convolutional one, goes with policies that do not decide about linears.
    return LinearAdapter(
        model,
        options.exclude,
        may_be_empty=not any(kind.needs_linears for kind in kinds),
        # Where nothing is asked, counting at every linear would only cost time. See decision 13. Beside a packer no
        # policy is asked at a linear.
        installs=not kinds or (any(kind.at_sites for kind in kinds) and not _packs(policies)),
    )


def _packs(policies: Sequence[Policy]) -> bool:
    return any(isinstance(policy, BatchPacker) for policy in policies)


def _find_places(policy: Policy, model: nn.Module, decisions: SiteDecisions, given: Given) -> Sequence[object]:
    """Return where a policy with state decides."""
    if not isinstance(policy, Stateful):
        return ()
    if isinstance(policy, GradientSelector):
        return decisions.sites_of(policy, given.linears)
    kind = find_kind(policy)
    find: FindPlaces | None = load(kind.places) if kind is not None and kind.places else None
    return () if find is None else find(policy, model, given)


def _make_extensions(
    policies: Sequence[Policy], model: nn.Module, given: Given
) -> Sequence[tuple[int, EngineExtension]]:
    """Return what carries policies out, in the order in which it changes the model, each with its number in it."""
    declared = [
        (number, name, policy)
        for policy in policies
        for each in (find_kind(policy), *find_aspects(policy))
        if each is not None
        for number, name in each.extensions
    ]
    found = list[tuple[int, EngineExtension]]()
    # Stable, by the number alone: extensions of one number keep the order of their policies.
    for number, name, policy in sorted(declared, key=lambda entry: entry[0]):
        make: MakeExtension = load(name)
        extension = make(policy, model, given)
        if extension is None:
            continue
        if not isinstance(extension, EngineExtension):
            base = f"{EngineExtension.__module__.rpartition('.core')[0]}.EngineExtension"
            raise PolicyError(f"{name} of {type(policy).__name__} must make a {base}, got {type(extension).__name__}")
        found.append((number, extension))
    return found


def refuse_model(model: nn.Module, policies: Sequence[Policy], chosen: Mapping[str, Any]) -> nn.Module:
    """Refuse a model into which policies cannot be put, before anything of it is changed, through whichever door.

    Args:
        model: The model with or without wrappers, as :func:`attach` takes it.
        policies: All of them.
        chosen: Options of the backward, and of ``attach``, by name.

    Returns:
        The model without wrappers.

    Raises:
        UnsupportedError: By name.
    """
    _refuse_unbuilt(model, policies, chosen)
    inner = _unwrap(model)
    _refuse_attached(inner)
    _refuse_lazy(inner)
    return inner


def _unwrap(model: nn.Module) -> nn.Module:
    """Return what DDP and ``torch.compile`` have wrapped: the names of its modules are those of sites and patterns."""
    while True:
        # torch.compile's wrapper is told by its child: its class would import torch._dynamo, and a plain model attaches
        # without.
        name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        inner = dict(model.named_children()).get(name)
        if inner is None:
            return model
        model = inner


def _refuse_attached(model: nn.Module) -> None:
    for name, module in model.named_modules():
        # Asked of the instance: an override is an entry in its dictionary, and the class has a forward in any case.
        if isinstance(module.__dict__.get("forward"), ForwardOverride) or is_watched(module):
            where = f" (at {name!r})" if name else ""
            raise UnsupportedError(f"the model is already attached{where}: call detach() of its engine first")


def _refuse_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"{name!r} has no shape before the model has run: run it once, and attach then")


def _refuse_unbuilt(model: nn.Module, policies: Sequence[Policy], chosen: Mapping[str, Any]) -> None:
    """Hold what the user chose against the table of what goes with what."""
    float8 = find_float8(model)
    wrapped = "compiled" if "_orig_mod" in dict(model.named_children()) else None
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        wrapped = "DDP"
    processes = count_processes(model)
    quantized = next((name for name, _ in find_quantized(model)), None)
    fused_head = any(has_fused_head(module) for module in model.modules())
    options = {
        "float8": float8,
        "quantization": quantized,
        "wrapped": wrapped,
        "processes": processes,
        "fused_head": fused_head,
    }
    facts = {**chosen, **options, "loop": "own"}
    words = {
        "processes": SEVERAL,
        "float8": f"float8 linears (at {float8!r})",
        "quantization": f"quantised linears (at {quantized!r})",
    }
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
        num_steps: Optimizer steps of the whole training; None if unknown.
        num_examples: Rows of the training data; None if unknown.
        reference: A model; ``batch``: its scores come with each batch.
        validation: One batch of examples with their labels; None: there are none.

    Raises:
        UsageError: A policy needs an argument that is missing, or one was given that no policy reads.
    """
    for policy in policies:
        needs_length(policy, num_steps)
        facts, name = find_facts(policy), type(policy).__name__
        if facts.get("needs_num_steps") and num_steps is None:
            raise UsageError(f"{name}: {facts['needs_num_steps']}: give attach(num_steps=...)")
        if facts.get("reads_rows") and num_examples is None:
            raise UsageError(
                f"{name} keeps something for each example of the data: give attach(num_examples=...), and each batch "
                f"the column {EXAMPLE_ROW!r}; data without rows, such as a stream, do not go with it"
            )
    readers = [p for p in policies if isinstance(p, ReferenceReader) and p.reads_reference]
    if readers and reference is None:
        raise UsageError(
            f"{type(readers[0]).__name__} compares with a reference: give attach(reference=MODEL), or "
            f"reference={BATCH!r} where each batch has a column reference_loss"
        )
    if isinstance(reference, str) and reference != BATCH:
        raise UsageError(f"reference must be a model or {BATCH!r}, got {reference!r}")
    runs = any(find_facts(policy).get("runs_reference") for policy in policies)
    if reference is not None and not readers and not (runs and not isinstance(reference, str)):
        raise UsageError("reference is given, and no policy compares with one")
    _check_validation(policies, validation)


def validates(policy: Policy) -> bool:
    """Return whether a policy compares gradients with those of validation examples.

    Args:
        policy: A policy with its options, on which the answer depends.

    Returns:
        Whether it does.
    """
    return _count_validation(policy) > 0


def _count_validation(policy: Policy) -> int:
    number = find_facts(policy).get("num_validation", 0)
    return number if isinstance(number, int) else 0


def _check_validation(policies: Sequence[Policy], validation: Mapping[str, torch.Tensor] | None) -> None:
    readers = [policy for policy in policies if validates(policy)]
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
    number, most = len(validation["labels"]), max(_count_validation(policy) for policy in readers)
    if number < most:
        raise UsageError(
            f"validation must have {most} examples or more, as {type(readers[0]).__name__} draws, got {number}"
        )
