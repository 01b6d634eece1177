"""Segments in a model whose own forward runs its layers, for ``attach(model, policies, segments=...)``.

The layers of all segments but the last run without a graph, and the last layer of each hands its output on through a
Function of autograd that has kept what the segment was given. Its backward runs the layers again, with a graph, and
differentiates them. Parameters are inputs of that Function, so that the sums over segments that share them, over
micro-batches and over processes are autograd's own, and hooks run once, when the last contribution has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.utils._pytree import tree_unflatten

from sparsebp_cli.backward.leaf import find_leaves
from sparsebp_cli.backward.segment.cut import Layers, cut, find_layers
from sparsebp_cli.backward.segment.passage import Passage
from sparsebp_cli.backward.site import Bound
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Step

if TYPE_CHECKING:
    from sparsebp_cli.backward.engine import Engine


@final
class Segments:
    """The segments of one model; see :class:`~sparsebp_cli.backward.part.Part`.

    They are how a step is executed and no policy, so they stay in force where policies are disabled: as with
    checkpointing, dense and policy are compared in the same way of running.

    Args:
        model: Its layers are found by themselves.
        segments: How many, or the first module of each.

    Raises:
        UsageError: There are not so many layers, or the names are not layers in their order.
        UnsupportedError: The model has no list of layers, or they are checkpointed.
    """

    def __init__(self, model: nn.Module, segments: int | Sequence[str]) -> None:
        self._layers: Layers = find_layers(model)
        self.segments = cut(segments, self._layers)
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False):
                where = f" (at {name!r})" if name else ""
                raise UnsupportedError(
                    f"segments and activation checkpointing{where} in one model are not built: "
                    "switch checkpointing off, segments compute layers again as well"
                )
        self._last_of = {number: part[-1] for part in self.segments for number in part}
        self._checked: set[int] = set()  # segments whose layers use nothing that is not theirs
        self._position = -1  # of the layer that ran last in this forward
        self._passage: Passage | None = None
        self._hook: Any = None

    def install(self, engine: Engine) -> None:
        names = self._layers.names
        starts = ", ".join(names[part[0]] for part in self.segments)
        engine.notes["segments"] = f"layers run in segments that begin with {starts}; all but the last are run again"
        self._hook = self._layers.owner.register_forward_pre_hook(_Start(self))
        for module in dict.fromkeys(self._layers.modules):
            module.forward = BoundLayer(module, self, module.__dict__.get("forward"))

    def remove(self) -> None:
        self._hook.remove()
        for module in dict.fromkeys(self._layers.modules):
            bound = module.__dict__.pop("forward")
            if bound.covered is not None:
                module.forward = bound.covered

    def enable(self, enabled: bool) -> None:
        """Stay in force: see the class."""

    def start_step(self, step: Step) -> None:
        """Do nothing: every step is the same."""

    def start_forward(self) -> None:
        """Begin with the first layer, whatever became of the forward before."""
        self._position, self._passage = -1, None

    def run(self, layer: BoundLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer as its place in a segment demands.

        Args:
            layer: The layer.
            args: Its arguments.
            kwargs: Its named arguments.

        Returns:
            What it gives.

        Raises:
            UnsupportedError: It cannot be run so.
        """
        if not torch.is_grad_enabled():
            return layer.plain(*args, **kwargs)
        try:
            self._position = position = self._find_position(layer.module)
            segment = next(part for part in self.segments if position in part)
            if segment is self.segments[-1]:
                return layer.plain(*args, **kwargs)
            if position == segment[0]:
                self._passage = self._open(segment)
            assert self._passage is not None
            passage = self._passage
            output = passage.run(layer.plain, args, kwargs)
            if position < segment[-1]:
                return output
            self._passage = None
            return self._close(passage, position, output)
        except BaseException:
            self.start_forward()
            raise

    def check_leaves(self, position: int, passage: Passage, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Refuse layers that use what is not theirs and requires grad: its gradient would be lost.

        Args:
            position: Of the segment's last layer.
            passage: That was run again.
            given: The tensors from outside, as leaves.
            outputs: With a graph.

        Raises:
            UnsupportedError: They do.
        """
        if position in self._checked:
            return
        own = {id(t) for t in (*given, *passage.parameters)}
        for leaf in find_leaves(outputs):
            if id(leaf) not in own:
                raise UnsupportedError(
                    f"segments: a layer from {passage.names[0]!r} to {passage.names[-1]!r} uses a tensor of shape "
                    f"{tuple(leaf.shape)} that requires grad and is neither its parameter nor its argument"
                )
        self._checked.add(position)

    def _find_position(self, module: nn.Module) -> int:
        modules = self._layers.modules
        follows = (self._position + 1) % len(modules)
        if modules[follows] is module:
            return follows
        if self._passage is None and modules[0] is module:  # layers that are run without their owner
            return 0
        names = self._layers.names
        raise UnsupportedError(
            f"segments: {names[modules.index(module)]!r} was run where {names[follows]!r} is the next layer: "
            "layers that are skipped or run in another order cannot be cut"
        )

    def _open(self, segment: range) -> Passage:
        names, modules = self._layers.names, self._layers.modules
        passage = Passage([names[n] for n in segment], [modules[n] for n in segment])
        for parameter in passage.parameters:
            if type(parameter.data) is not Tensor and _is_sharded(parameter):
                raise UnsupportedError("segments of sharded weights (FSDP2) are not built: gather them, or use DDP")
        return passage

    def _close(self, passage: Passage, position: int, output: Any) -> Any:
        leaves, places, spec = passage.finish(output)
        given = passage.forget()
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if places and any(t.requires_grad for t in (*given, *passage.parameters)):
            work = _Work(self, passage, position, tuple(places), len(given))
            results = _Segment.apply(work, [leaves[n] for n in places], *given, *passage.parameters)  # type: ignore[no-untyped-call]
            for place, result in zip(places, results, strict=True):
                leaves[place] = result
        return tree_unflatten(leaves, spec)


class BoundLayer(Bound):
    """The ``forward`` of one layer.

    Args:
        module: The layer.
        segments: Who runs it.
        covered: What stood in its place.
    """

    def __init__(self, module: nn.Module, segments: Segments, covered: Any) -> None:
        self.module, self.segments, self.covered = module, segments, covered

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as if there were no segments."""
        if self.covered is not None:
            return self.covered(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    # In a compiled model the layers run as they are: what is run again in a backward is no part of a graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.segments.run(self, args, kwargs)


class _Start:
    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002 - torch's signature
        if torch.is_grad_enabled():
            self._segments.start_forward()


class _Work:
    """What the backward of one segment needs beside tensors.

    Args:
        segments: Whose it is.
        passage: The forward.
        position: Of the segment's last layer.
        places: Of the outputs' leaves that a gradient can arrive at.
        num_given: Tensors from outside.
    """

    def __init__(
        self, segments: Segments, passage: Passage, position: int, places: tuple[int, ...], num_given: int
    ) -> None:
        self.segments, self.passage, self.position = segments, passage, position
        self.places, self.num_given = places, num_given

    def run_again(self, given: list[Tensor], grads: tuple[Tensor | None, ...]) -> list[tuple[Tensor, Tensor]]:
        """Run the segment with a graph; return its outputs that have one, each with the gradient that arrived."""
        with torch.enable_grad():
            leaves = self.passage.again(given)
        outputs = [leaves[place] for place in self.places]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        self.segments.check_leaves(self.position, self.passage, given, [output for output, _ in pairs])
        return pairs


@final
class _Segment(Function):
    """A segment that has been run, and whose backward runs it again."""

    @staticmethod
    def forward(ctx: Any, work: _Work, outputs: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.work = work
        ctx.save_for_backward(*tensors[: work.num_given])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        work, needs = ctx.work, ctx.needs_input_grad[2:]
        gradients: list[Tensor | None] = [None] * len(needs)
        given = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needs, strict=False)]
        pairs = work.run_again(given, grads) if any(grad is not None for grad in grads) else []
        if pairs:
            outputs, arrived = zip(*pairs, strict=True)
            sources = [*given, *work.passage.parameters]
            wanted = [number for number, need in enumerate(needs) if need]
            found = torch.autograd.grad(outputs, [sources[n] for n in wanted], arrived, allow_unused=True)
            for number, gradient in zip(wanted, found, strict=True):
                gradients[number] = gradient
        return None, None, *gradients


def _is_sharded(parameter: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter.data, DTensor)
