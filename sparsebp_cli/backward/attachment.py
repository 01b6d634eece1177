"""Attaching policies to a model: find the sites, and refuse unsupported combinations before the model changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from sparsebp_cli.backward.core.decision import SiteDecisions
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.extension import EngineExtension, SiteAdapter
from sparsebp_cli.backward.core.given import FindPlaces, Given, MakeExtension
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.core.process import SEVERAL, count_processes
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.update import choose_update
from sparsebp_cli.backward.execution.segment.extension import Segments
from sparsebp_cli.backward.kind.fused_head import has_fused_head
from sparsebp_cli.backward.linear.float8 import find_float8
from sparsebp_cli.backward.linear.input_saver import SavesInputs
from sparsebp_cli.backward.linear.quantized import find_quantized
from sparsebp_cli.backward.linear.site import LinearAdapter
from sparsebp_cli.backward.node.site import NodeAdapter
from sparsebp_cli.backward.observe.attribution import is_watched
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import (
    BatchPacker,
    GradientSelector,
    Policy,
    PolicyLike,
    ReferenceReader,
    Stateful,
    Step,
    make_policies,
)
from sparsebp_cli.policy.composition import BackwardChoices, BackwardOptions, PolicyFacts, Setup, refuse
from sparsebp_cli.policy.kind import load
from sparsebp_cli.policy.known_kind import find_aspects, find_facts, find_kind, list_kinds
from sparsebp_cli.policy.scheduled_option import needs_length


def attach(
    model: nn.Module,
    policies: PolicyLike | Sequence[PolicyLike],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    num_steps: int | None = None,
    reference: nn.Module | Literal["batch"] | None = None,
    **choices: Unpack[BackwardChoices],
) -> Engine:
    """Attach policies to a model, for any PyTorch loop that calls ``engine.backward(loss)``.

    Args:
        model: The model, which ``attach`` changes in place and ``engine.detach()`` restores. Its state_dict keys do not
            change. You may wrap it in DDP or ``torch.compile`` before or afterwards. With gradient policies at linears
            it compiles to one graph (``fullgraph=True``), which calls the policies at every backward.
        policies: One or several, each a policy, its name, or a mapping of ``name`` and its options. At most one policy
            makes each decision; without policies training is dense.
        optimizer: Its steps advance ``Step.index``; without it, every backward does.
        max_grad_norm: With ``update="eager"``, the 2-norm to which gradients are clipped, greater than 0; None: no
            clipping.
        seed: Seed of random decisions. Each also depends on the step, the site and the process.
        num_steps: Optimizer steps of the whole training; policies with a schedule over the training need it.
        reference: A model with whose loss of each token a policy compares. ``batch``: each batch contains that loss as
            ``reference_loss``, (B, T), at the position that predicts the token. With ``lossless``, the reference model
            of your own loss, which runs the same batches without gradient; the engine skips the same rows in it.
        **choices: How the backward pass is executed: the fields of :class:`sparsebp_cli.BackwardOptions`, which are
            the section ``backward`` of a recipe: ``execution``, ``sites``, ``exclude``, ``update``, ``eager_clip``,
            ``checkpointing``, ``segments``.

    Returns:
        The engine; as a context manager it detaches at the end.

    Raises:
        PolicyError: A policy's name is unknown, one of its options is wrong, or it could keep hidden state.
        UnsupportedError: The combination is not supported: a kind of policy, two policies that make the same decision,
            options that exclude each other, or a model that is attached already or offloaded.
        UsageError: A choice is unknown or not allowed, ``exclude`` matches nothing, or the model has no linear.
    """
    policies = make_policies(policies)
    options = BackwardOptions.of(choices)
    clipping = Clipping(max_grad_norm, options.eager_clip)
    chosen = {**dict(options), "max_grad_norm": max_grad_norm, "optimizer": optimizer}
    inner = refuse_model(model, policies, chosen)
    selectors = [policy for policy in policies if isinstance(policy, GradientSelector)]
    check_scoring(policies, num_steps, reference)
    wrapped, model = model, inner
    layers = LayerNumbers(model)
    decisions = SiteDecisions(selectors, len(layers.layers))
    adapter = _make_adapter(model, policies, options)
    given = Given(
        optimizer=optimizer,
        first=Step(0, seed=seed, num_steps=num_steps),
        num_layers=len(layers.layers),
        linears=adapter.sites if isinstance(adapter, LinearAdapter) else (),
        reference=reference,
        exclude=options.exclude,
        packs=_packs(policies),
    )
    states = PolicyStates(
        [(policy, _find_places(policy, model, decisions, given)) for policy in policies],
        # A function, because `.grad` is another tensor at each step.
        lambda: {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    )
    given = replace(given, states=states)
    extensions = _make_extensions(policies, model, given)
    savings = [extension for extension in extensions if isinstance(extension, SavesInputs)]
    if selectors and adapter.names:  # nodes have no names before the first backward
        others = [(saving.policy, saving.scope) for saving in savings]
        decisions.check_disjoint(adapter.names, layers.number_of, others)
    for saving in savings:
        assert isinstance(adapter, LinearAdapter), "attach refuses saved inputs at other sites"
        adapter.save_by(saving)
    attached = Engine(
        adapter,
        decisions,
        model=model,
        optimizer=optimizer,
        reference=options.execution == "reference",
        seed=seed,
        num_steps=num_steps,
        states=states,
        # The eager update frees gradients, so it comes after every extension that reads them. See decision 29.
        extensions=[
            *extensions,
            *choose_update(wrapped, optimizer, options.update, clipping),
            *([] if options.segments is None else [Segments(model, options.segments)]),
        ],
    )
    if any(find_facts(policy).get("names_layers") for policy in policies):
        attached.notes["layers"] = layers.describe()
    return attached


def _make_adapter(model: nn.Module, policies: Sequence[Policy], options: BackwardOptions) -> SiteAdapter:
    """Return the adapter for the sites that the policies and options select."""
    kinds = list_kinds(policies)
    for policy, kind in zip(policies, kinds, strict=True):
        if kind.adapter:
            adapter: SiteAdapter = load(kind.adapter)(policy, model, Given(exclude=options.exclude))
            return adapter
    if options.sites != "linears":
        return NodeAdapter(model, options.exclude)
    # Policies that do not decide about linears work in a model without linears, such as a convolutional network.
    return LinearAdapter(
        model,
        options.exclude,
        may_be_empty=not any(kind.needs_linears for kind in kinds),
        # Without decisions at linears, counting there would only cost time. See decision 13. A packer excludes them.
        installs=not kinds or (any(kind.at_sites for kind in kinds) and not _packs(policies)),
    )


def _packs(policies: Sequence[Policy]) -> bool:
    return any(isinstance(policy, BatchPacker) for policy in policies)


def _find_places(policy: Policy, model: nn.Module, decisions: SiteDecisions, given: Given) -> Sequence[object]:
    """Return the places where a policy with state decides; empty for other policies."""
    if not isinstance(policy, Stateful):
        return ()
    if isinstance(policy, GradientSelector):
        return decisions.sites_of(policy, given.linears)
    kind = find_kind(policy)
    find: FindPlaces | None = load(kind.places) if kind is not None and kind.places else None
    return () if find is None else find(policy, model, given)


def _make_extensions(policies: Sequence[Policy], model: nn.Module, given: Given) -> Sequence[EngineExtension]:
    """Return the extensions that execute policies, in the order in which they change the model: an override wraps the
    forward that it finds.
    """
    declared = [
        (number, name, policy)
        for policy in policies
        for each in (find_kind(policy), *find_aspects(policy))
        if each is not None
        for number, name in each.extensions
    ]
    found = list[EngineExtension]()
    # The sort is stable: extensions with the same number keep the order of their policies.
    for _, name, policy in sorted(declared, key=lambda entry: entry[0]):
        make: MakeExtension = load(name)
        extension = make(policy, model, given)
        if extension is None:
            continue
        if not isinstance(extension, EngineExtension):
            base = f"{EngineExtension.__module__.rpartition('.core')[0]}.EngineExtension"
            raise PolicyError(f"{type(policy).__name__}: {name} must return a {base}, got {type(extension).__name__}")
        found.append(extension)
    return found


def refuse_model(model: nn.Module, policies: Sequence[Policy], chosen: Mapping[str, Any]) -> nn.Module:
    """Refuse a model to which policies cannot be attached, before it changes. All entry points call this.

    Args:
        model: The model with or without wrappers, as for :func:`attach`.
        policies: All policies of the model.
        chosen: Options of the backward, and of ``attach``, by name.

    Returns:
        The model without wrappers.

    Raises:
        UnsupportedError: The combination is not supported, or the model is attached already.
        UsageError: A parameter has no shape before the model's first forward.
    """
    _refuse_unbuilt(model, policies, chosen)
    inner = _unwrap(model)
    _refuse_attached(inner)
    _refuse_lazy(inner)
    return inner


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and ``torch.compile``. Sites and patterns use the names of its modules."""
    while True:
        # Recognise torch.compile's wrapper by its child: importing its class would import torch._dynamo, which a plain
        # model does not need.
        name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        inner = dict(model.named_children()).get(name)
        if inner is None:
            return model
        model = inner


def _refuse_attached(model: nn.Module) -> None:
    for name, module in model.named_modules():
        # Look in the instance's dictionary, where an override is. The class always has a forward.
        if isinstance(module.__dict__.get("forward"), ForwardOverride) or is_watched(module):
            where = f" (at {name!r})" if name else ""
            raise UnsupportedError(f"the model is already attached{where}: call detach() of its engine first")


def _refuse_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"parameter {name!r} is lazy and has no shape yet: run the model once before attach")


def _refuse_unbuilt(model: nn.Module, policies: Sequence[Policy], chosen: Mapping[str, Any]) -> None:
    """Refuse choices that the table of combinations does not support."""
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
        "float8": f"float8 linear layers (at {float8!r})",
        "quantization": f"quantised linear layers (at {quantized!r})",
    }
    refuse(Setup([PolicyFacts.of(policy) for policy in policies], facts, words=words))


BATCH = "batch"


def check_scoring(
    policies: Sequence[Policy],
    num_steps: int | None,
    reference: nn.Module | str | None,
) -> None:
    """Refuse a policy that lacks an argument of ``attach``, and a reference that no policy reads.

    Args:
        policies: All policies to attach.
        num_steps: Optimizer steps of the whole training; None if unknown.
        reference: A model; ``batch``: each batch contains its losses.

    Raises:
        UsageError: An argument that a policy needs is missing, or no policy reads an argument.
    """
    for policy in policies:
        needs_length(policy, num_steps)
        facts, name = find_facts(policy), type(policy).__name__
        if facts.get("needs_num_steps") and num_steps is None:
            raise UsageError(f"{name}: {facts['needs_num_steps']}: pass attach(num_steps=...)")
    readers = [p for p in policies if isinstance(p, ReferenceReader) and p.reads_reference]
    if readers and reference is None:
        raise UsageError(
            f"{type(readers[0]).__name__} needs a reference model: pass attach(reference=MODEL), or "
            f"reference={BATCH!r} if each batch has the column reference_loss"
        )
    if isinstance(reference, str) and reference != BATCH:
        raise UsageError(f"reference must be a model or {BATCH!r}, got {reference!r}")
    runs = any(find_facts(policy).get("runs_reference") for policy in policies)
    if reference is not None and not readers and not (runs and not isinstance(reference, str)):
        raise UsageError("no policy uses a reference: leave the argument reference out of attach")
