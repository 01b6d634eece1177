"""A residual branch of an attached model inside of a graph that ``torch.compile`` makes.

The branch's forward becomes a part of the graph, computed without a gradient. Its backward is one operator that the
compiler does not look into: it asks the policy and runs the branch again for the kept rows, as in eager mode. Graphs
hold the number of a site, as those of linears do (:mod:`sparsebp_cli.backward.linear.compiled`).

An operator must return a tensor of its own, so joining forward and backward copies the output of each branch once.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.branch.branch import Call
from sparsebp_cli.backward.branch.recompute import RowSelector, differentiate
from sparsebp_cli.backward.branch.stored_outputs import names_to_keep
from sparsebp_cli.backward.decoder.decoder import dropout_rates
from sparsebp_cli.backward.linear.compiled import UNSAFE, find_site, register, require_site
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, call_module


class GraphBranch(RowSelector, Protocol):
    """The site of a branch, as a graph refers to it."""

    def mask(self, grad: Tensor) -> Tensor:
        """Return what the policy keeps of the gradient of the branch's output."""

    def begin(self, x: Tensor, kwargs: dict[str, object], *, input_needs_grad: bool) -> Call:
        """Return a record of the forward whose backward begins now."""


class GraphForward:
    """The forward of one branch in graphs; ``stores`` as that of the engine."""

    def __init__(self, site: GraphBranch, patches: ForwardPatches, *, stores: bool) -> None:
        branch = self._branch = site.branch
        self._number = register(site)
        self._parameters = list({id(p): p for part in branch.parts for p in part.parameters()}.values())
        self._dropouts = branch.dropouts.modules
        functions = [m for part in branch.parts for m in part.modules() if not isinstance(m, nn.Dropout)]
        drops = any(rate > 0.0 for module in functions for rate in dropout_rates(module))
        clips = getattr(getattr(branch.core, "config", None), "clip_qkv", None) is not None  # olmo: in place
        self._draws, self._writes = drops, clips
        self._recorded: dict[str, Tensor | None] | None = None  # by linear; None: called twice
        self._kept = names_to_keep(branch, stores=stores)
        for name, module, _ in branch.linears:
            if name in self._kept:
                patches.install(module, _Recorder(self, name, module))

    def fits(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Whether a call of the core can be a part of a graph: nothing is drawn, which compilers do in their own way,
        or written to what is stored, and its arguments can be handed to the backward.
        """
        drops = self._branch.core.training and (self._draws or any(module.p > 0.0 for module in self._dropouts))
        return not (drops or self._writes or args) and all(_is_known(value) for value in kwargs.values())

    def run(self, x: Tensor, kwargs: dict[str, object]) -> Tensor:
        """Run the branch in a graph that is being made; ``kwargs`` are those of its core, without input and cache."""
        branch = self._branch
        text, arguments = _describe(kwargs)
        whole = branch.find_unsupported((), kwargs) != ""
        recorded: dict[str, Tensor | None] = {}
        self._recorded = recorded
        with torch.no_grad():
            normed = x if branch.before is None else call_module(branch.before, x)
            output = call_module(branch.core, normed, **kwargs)
            output = branch.finish(output[0] if isinstance(output, tuple) else output)
        self._recorded = None
        kept = {name: recorded.get(name) for name in self._kept if not whole}
        stored = {name: output for name, output in kept.items() if output is not None}
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        names, outputs = ",".join(stored), list(stored.values())
        joined: Tensor = _branch(x, output, outputs, trained, arguments, self._number, names, text, autocast)
        return joined

    def mask(self, output: Tensor) -> Tensor:
        """Let the policy mask the gradient of the branch's output in a graph that is being made."""
        masked: Tensor = _masked(output, self._number)
        return masked

    def record(self, name: str, output: Tensor) -> None:
        """Store the output of a linear while a graph is made of the branch; one that is called twice is not stored."""
        if self._recorded is not None:
            self._recorded[name] = None if name in self._recorded else output


@final
class _Recorder(ForwardOverride):
    """The ``forward`` of a linear whose output is stored."""

    def __init__(self, graph: GraphForward, name: str, module: nn.Module) -> None:
        self.graph, self.name, self.module = graph, name, module

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        output: Tensor = call_module(self.module, *args, **kwargs)
        if not self.is_removed:
            self.graph.record(self.name, output)
        return output


_PLAIN = (bool, int, float, str)


def _is_known(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(part, Tensor) for part in value)
    return value is None or isinstance(value, (Tensor, *_PLAIN))


def _describe(kwargs: Mapping[str, object]) -> tuple[str, list[Tensor]]:
    """Return named arguments as text, since graphs hold no dictionaries, and the tensors among them."""
    text = ""
    tensors: list[Tensor] = []
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            text += f"{name}\ttensor\n"
            tensors.append(value)
        elif isinstance(value, tuple):
            text += f"{name}\t{len(value)} tensors\n"
            tensors += value
        else:
            text += f"{name}\t{value!r}\n"
    return text, tensors


def _restore(text: str, tensors: list[Tensor]) -> dict[str, object]:
    """Return the arguments that :func:`_describe` got."""
    left = iter(tensors)
    kwargs = dict[str, object]()
    for line in text.splitlines():
        name, kind = line.split("\t", 1)
        if kind == "tensor":
            kwargs[name] = next(left)
        elif kind.endswith(" tensors"):
            kwargs[name] = tuple(next(left) for _ in range(int(kind.removesuffix(" tensors"))))
        else:
            kwargs[name] = literal_eval(kind)
    return kwargs


@torch.library.custom_op(
    "sparsebp::branch",
    mutates_args=(),
    schema="(Tensor x, Tensor output, Tensor[] kept, Tensor[] parameters, Tensor[] arguments, SymInt site, str names, "
    "str call, ScalarType? autocast) -> Tensor",
)
def _branch(x: Tensor, output: Tensor, *_: object) -> Tensor:  # noqa: ARG001  x and others for the backward
    return output.clone(memory_format=torch.contiguous_format)


@_branch.register_fake
def _branch_shape(x: Tensor, output: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return output.new_empty(output.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, _, kept, parameters, arguments, site, ctx.names, ctx.call, ctx.autocast = inputs
    # Where a backend leaves this node in autograd's graph, readers of the graph look the site up here.
    ctx.number, ctx.site, ctx.sizes = site, find_site(site), (len(kept), len(parameters), len(arguments))
    ctx.needs_dgrad = ctx.needs_input_grad[0]
    ctx.save_for_backward(x, *kept, *parameters, *arguments)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[object, ...]:
    x, *saved = ctx.saved_tensors
    num_kept, num_parameters, num_arguments = ctx.sizes
    kept, rest = saved[:num_kept], saved[num_kept:]
    parameters, arguments = rest[:num_parameters], rest[num_parameters:]
    made = torch.ops.sparsebp.branch_backward(
        grad, x, kept, parameters, arguments, ctx.number, ctx.names, ctx.call, ctx.autocast, ctx.needs_dgrad
    )
    dx, of_parameters = (made[0], made[1:]) if ctx.needs_dgrad else (None, made)
    return dx, None, [None] * num_kept, list(of_parameters), [None] * num_arguments, None, None, None, None


_branch.register_autograd(_differentiate, setup_context=_save)

# Not a custom_op, whose function runs below autograd: this one needs autograd inside.
torch.library.define(
    "sparsebp::branch_backward",
    "(Tensor grad, Tensor x, Tensor[] kept, Tensor[] parameters, Tensor[] arguments, SymInt site, str names, str call, "
    "ScalarType? autocast, bool needs_dgrad) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, *UNSAFE),
)


@torch.library.impl("sparsebp::branch_backward", "default")
def _branch_backward(  # noqa: PLR0913, PLR0917 - graphs hold no objects
    grad: Tensor,
    x: Tensor,
    kept: list[Tensor],
    parameters: list[Tensor],
    arguments: list[Tensor],
    site: int,
    names: str,
    call: str,
    autocast: torch.dtype | None,
    needs_dgrad: bool,
) -> list[Tensor]:
    found = cast("GraphBranch", require_site(site))
    branch = found.branch
    x = x.detach().requires_grad_(needs_dgrad)
    begun = found.begin(x, _restore(call, arguments), input_needs_grad=needs_dgrad)
    begun.kept = dict(zip(names.split(",") if names else (), kept, strict=True))
    begun.autocast = autocast is not None, autocast or torch.get_autocast_dtype(x.device.type)
    wanted = branch.parameters()
    assert len(wanted) == len(parameters), "a change of what is trained compiles again"
    dx, gradients = differentiate(found, begun, x, grad, wanted)
    made = [dx] if needs_dgrad else []
    likes = [x, *wanted] if needs_dgrad else wanted
    # With the strides of the function below, for which the graph was made.
    return list(_fill([*made, *gradients], likes))


def _fill(gradients: list[Tensor | None], likes: list[Any]) -> Iterator[Tensor]:
    for gradient, like in zip(gradients, likes, strict=True):
        yield (
            # The operator's schema returns tensors alone, so a gradient that does not exist becomes zeros.
            torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            if gradient is None
            else (gradient.detach().contiguous())
        )


def _branch_backward_shapes(grad: Tensor, x: Tensor, kept: object, parameters: list[Tensor], *others: Any) -> Any:  # noqa: ARG001
    return [like.new_empty(like.shape) for like in ([x] if others[-1] else []) + parameters]


torch.library.register_fake("sparsebp::branch_backward", _branch_backward_shapes)


@torch.library.custom_op("sparsebp::masked", mutates_args=(), schema="(Tensor output, SymInt site) -> Tensor")
def _masked(output: Tensor, site: int) -> Tensor:  # noqa: ARG001  for the backward
    return output.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "sparsebp::masked_backward", mutates_args=(), schema="(Tensor grad, SymInt site) -> Tensor", tags=UNSAFE
)
def _masked_backward(grad: Tensor, site: int) -> Tensor:
    masked = cast("GraphBranch", require_site(site)).mask(grad).contiguous()
    # A policy may keep everything, and an operator must not return what it was given.
    return masked.clone() if masked.data_ptr() == grad.data_ptr() else masked


@_masked.register_fake
@_masked_backward.register_fake
def _same_shape(tensor: Tensor, site: int) -> Tensor:  # noqa: ARG001
    return tensor.new_empty(tensor.shape)


def _save_site(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.number, ctx.site = inputs[1], find_site(inputs[1])


_masked.register_autograd(lambda ctx, grad: (_masked_backward(grad, ctx.number), None), setup_context=_save_site)
