"""Puts a policy into a model: finds the sites, and refuses by name what is not built, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsebp_cli.backward.branch.site import BranchAdapter
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.extension import EngineExtension, SiteAdapter
from sparsebp_cli.backward.core.process import SEVERAL, count_processes
from sparsebp_cli.backward.core.selector_runner import SelectorRunner
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.options import choose_update
from sparsebp_cli.backward.execution.segment.extension import Segments
from sparsebp_cli.backward.linear.float8 import find_float8
from sparsebp_cli.backward.linear.site import LinearAdapter
from sparsebp_cli.backward.node.router import Routing
from sparsebp_cli.backward.node.site import NodeAdapter
from sparsebp_cli.backward.observe.attribution import is_watched
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.backward.selection.example import ExampleExtension
from sparsebp_cli.backward.selection.parameter import ParameterExtension, refuse_lazy
from sparsebp_cli.backward.selection.token.extension import make_extensions
from sparsebp_cli.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import EdgeRouter, ExampleSelector, GradientSelector, ParameterSelector, Policy, TokenSelector

Sites = Literal["linears", "branches", "nodes"]
Update = Literal["deferred", "eager"]
EagerClip = Literal["parameter", "previous", "exact"]
Checkpointing = Literal["none", "sparse"]
Carrier = Literal["fast", "reference"]


def attach(  # noqa: PLR0913 - each is one choice of the user
    model: nn.Module,
    policies: Sequence[Policy],
    *,
    sites: Sites = "linears",
    optimizer: torch.optim.Optimizer | None = None,
    update: Update = "deferred",
    max_grad_norm: float | None = None,
    eager_clip: EagerClip | None = None,
    segments: int | Sequence[str] | None = None,
    checkpointing: Checkpointing = "none",
    engine: Carrier = "fast",
    exclude: Iterable[str] = (),
    seed: int = 0,
    num_steps: int | None = None,
    reference: nn.Module | Literal["batch"] | None = None,
) -> Engine:
    """Let policies decide about a model's gradients, in any PyTorch loop that calls ``engine.backward(loss)``.

    Args:
        model: Changed in place; ``engine.detach()`` gives it back. Its state_dict keys stay as they are. It may be
            wrapped by DDP or ``torch.compile`` before or afterwards.
        policies: At most one answers each question; none is dense.
        sites: Where gradient policies are asked: ``linears``, the output of every ``nn.Linear`` and ``Conv1D``;
            ``branches``, the output of every residual branch; ``nodes``, every gradient in the autograd graph. Routers
            are asked at ``nodes``.
        optimizer: Its steps advance ``Step.index``; without it, every backward does.
        update: When parameters change: ``deferred``, by the optimizer after the backward; ``eager``, inside the
            backward, as soon as a parameter's gradient is complete, which is then freed.
        max_grad_norm: Under ``eager``, what gradients are clipped to, greater than 0; None: they are not.
        eager_clip: By which norm they are clipped: ``parameter``, each by its own; ``previous``, by that of all
            together in the step before; ``exact``, by that of all together, which a backward of its own finds first.
        segments: In how many parts of the layers, or by the first module of each, forward and backward are run: only
            the inputs of these are kept, and all but the last are computed again. None: in one.
        checkpointing: What branches keep for their backward where rows are selected: ``none``, what their linears
            gave; ``sparse``, their input, and the kept rows are multiplied again.
        engine: ``fast`` multiplies only what was selected; ``reference`` masks the gradient and multiplies all;
            at nodes it is a walk over the graph in Python.
        exclude: Globs over module names; what matches stays dense.
        seed: Of random decisions.
        num_steps: Optimizer steps of the whole training; policies with a schedule over all of it need it.
        reference: A model whose loss of each token a policy compares with; ``batch``: each batch brings that loss as
            ``reference_loss``, (B, T), at the position that predicts the token.

    Returns:
        The engine; as a context manager it detaches at the end.

    Raises:
        UnsupportedError: Something that is not built: a kind of policy, two policies with one question, another
            ``sites``, ``update`` or ``segments``, a model that is attached or offloaded.
        UsageError: ``engine`` is unknown, ``exclude`` matches nothing, or the model has no linear.
    """
    chosen: dict[str, Any] = {"sites": sites, "update": update, "checkpointing": checkpointing, "engine": engine}
    for name, value in chosen.items():
        if value not in _CHOICES[name]:
            known = ", ".join(_CHOICES[name])
            raise UsageError(f"{name} must be one of {known}, got {value!r}{did_you_mean(str(value), _CHOICES[name])}")
    clipping = Clipping(max_grad_norm, eager_clip)
    chosen |= {"max_grad_norm": max_grad_norm, "eager_clip": eager_clip, "segments": segments, "optimizer": optimizer}
    _refuse_unbuilt(model, policies, chosen)
    asked_at_sites = (p for p in policies if isinstance(p, GradientSelector | EdgeRouter))
    policy, runner = next(asked_at_sites, None), None
    check_scoring(policies, num_steps, reference)
    wrapped, model = model, _unwrap(model)
    _refuse_attached(model)
    refuse_lazy(model)
    layers = LayerNumbers(model)
    if isinstance(policy, EdgeRouter):
        adapter: SiteAdapter = NodeAdapter(model, exclude, Routing(policy))
    else:
        runner = None if policy is None else SelectorRunner(policy, len(layers.layers))
        dense = policy is None and sites == "linears"  # then a model needs no linear: a convolutional one in segments
        adapter = LinearAdapter(model, exclude, may_be_empty=True) if dense else _ADAPTERS[sites](model, exclude)
    tokens = make_extensions(policies, model, reference)
    eager = choose_update(wrapped, optimizer, update, clipping)
    attached = Engine(
        adapter,
        runner,
        model=model,
        optimizer=optimizer,
        reference=engine == "reference",
        stores=checkpointing == "none",
        seed=seed,
        num_steps=num_steps,
        extensions=[
            *tokens,
            *(
                make(policy, model)
                for kind, make in _EXTENSIONS.items()
                for policy in policies
                if isinstance(policy, kind)
            ),
            *eager,
            *([] if segments is None else [Segments(model, segments)]),
        ],
    )
    if any(_names_layers(policy) for policy in policies):
        attached.notes["layers"] = layers.describe()
    return attached


def _names_layers(policy: Policy) -> bool:
    if isinstance(policy, GradientSelector):
        return policy.layers is not None
    return isinstance(policy, ParameterSelector) and policy.changes


_ADAPTERS: dict[str, Callable[[nn.Module, Iterable[str]], SiteAdapter]] = {
    "linears": LinearAdapter,
    "branches": BranchAdapter,
    "nodes": NodeAdapter,
}


_CHOICES: dict[str, tuple[str, ...]] = {
    "sites": get_args(Sites),
    "update": get_args(Update),
    "checkpointing": get_args(Checkpointing),
    "engine": get_args(Carrier),
}


# Who carries out the policies that are not asked at sites, in the order in which they change the model.
_EXTENSIONS: dict[Any, Callable[[Any, nn.Module], EngineExtension]] = {
    ParameterSelector: ParameterExtension,
    ExampleSelector: ExampleExtension,
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


def check_scoring(policies: Sequence[Policy], num_steps: int | None, reference: nn.Module | str | None) -> None:
    """Refuse a policy without what it chooses by, and a reference that nobody reads.

    Args:
        policies: All that are to be attached.
        num_steps: Optimizer steps of the whole training; None: nobody told.
        reference: A model; ``batch``: its scores come with each batch.

    Raises:
        UsageError: Something is missing, or given for nothing.
    """
    for policy in policies:
        if isinstance(policy, ExampleSelector) and policy.needs_num_steps and num_steps is None:
            name = type(policy).__name__
            raise UsageError(f"{name}: start and end are shares of the training: give attach(num_steps=...)")
    readers = [p for p in policies if isinstance(p, TokenSelector) and "reference_loss" in p.needs]
    if readers and reference is None:
        raise UsageError(
            f"{type(readers[0]).__name__} compares with a reference: give attach(reference=MODEL), or "
            f"reference={BATCH!r} where each batch has a column reference_loss"
        )
    if isinstance(reference, str) and reference != BATCH:
        raise UsageError(f"reference must be a model or {BATCH!r}, got {reference!r}")
    if reference is not None and not readers:
        raise UsageError("reference is given, and no policy compares with one")
