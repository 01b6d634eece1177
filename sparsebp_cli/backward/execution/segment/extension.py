"""Segments in a model whose own forward runs its layers, for ``attach(model, policies, segments=...)``.

The layers of all segments but the last run without a graph, and the last layer of each hands its output on through a
Function of autograd that has kept what the segment was given. Its backward runs the layers again, with a graph, and
differentiates them. Parameters are inputs of that Function, so that the sums over segments that share them, over
micro-batches and over processes are autograd's own, and hooks run once, when the last contribution has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from sparsebp_cli.backward.execution.segment.function import SegmentFunction, SegmentWork
from sparsebp_cli.backward.execution.segment.recorded_forward import RecordedForward
from sparsebp_cli.backward.execution.segment.split import LayerSequence, cut, find_layers
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Step

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView


@final
class Segments:
    """The segments of one model; see :class:`~sparsebp_cli.backward.core.extension.EngineExtension`.

    They are how a step is executed and no policy, so they stay in force where policies are disabled: as with
    checkpointing, dense and policy are compared in the same way of running.

    Args:
        model: Its layers are found by themselves.
        segments: How many, or the first module of each.

    Raises:
        UsageError: There are not so many layers, or the names are not layers in their order.
        UnsupportedError: The model has no list of layers, or they are checkpointed, or dropped at random.
    """

    def __init__(self, model: nn.Module, segments: int | Sequence[str]) -> None:
        self._layers: LayerSequence = find_layers(model)
        self.segments = cut(segments, self._layers)
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False):
                where = f" (at {name!r})" if name else ""
                raise UnsupportedError(
                    f"segments and activation checkpointing{where} in one model are not built: "
                    "switch checkpointing off, segments compute layers again as well"
                )
        dropped = getattr(self._layers.owner, "layerdrop", 0.0)  # transformers' name, of speech and of BART's kind
        if isinstance(dropped, float | int) and dropped > 0.0:
            name = type(self._layers.owner).__name__
            raise UnsupportedError(f"segments: {name} skips layers at random (layerdrop={dropped}): set it to 0")
        self._checked: set[str] = set()  # segments whose layers use nothing that is not theirs
        self._position = -1  # of the layer that ran last in this forward
        self._passage: RecordedForward | None = None
        self._hook: Any = None

    def install(self, engine: EngineView) -> None:
        names = self._layers.names
        starts = ", ".join(names[part[0]] for part in self.segments)
        engine.notes["segments"] = f"layers run in segments that begin with {starts}; all but the last are run again"
        self._hook = self._layers.owner.register_forward_pre_hook(_Start(self))
        for module in dict.fromkeys(self._layers.modules):
            module.forward = LayerOverride(module, self, module.__dict__.get("forward"))

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

    def run(self, layer: LayerOverride, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            return self._close(passage, output)
        except BaseException:
            self.start_forward()
            raise

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

    def _open(self, segment: range) -> RecordedForward:
        names, modules = self._layers.names, self._layers.modules
        if segment is self.segments[0] and any(_is_sharded(p) for module in modules for p in module.parameters()):
            raise UnsupportedError("segments of sharded weights (FSDP2) are not built: use DDP")
        return RecordedForward([names[n] for n in segment], [modules[n] for n in segment])

    def _close(self, passage: RecordedForward, output: Any) -> Any:
        leaves, places, spec = passage.finish(output)
        given = passage.forget()
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if places and any(t.requires_grad for t in (*given, *passage.parameters)):
            work = SegmentWork(passage, tuple(places), len(given), self._checked)
            results = SegmentFunction.apply(work, [leaves[n] for n in places], *given, *passage.parameters)  # type: ignore[no-untyped-call]
            for place, result in zip(places, results, strict=True):
                leaves[place] = result
        return tree_unflatten(leaves, spec)


class LayerOverride(ForwardOverride):
    """The ``forward`` of one layer.

    Args:
        module: The layer.
        segments: Who runs it.
        covered: What stood in its place.
    """

    def __init__(self, module: nn.Module, segments: Segments, covered: Any) -> None:
        self.module, self.segments, self.covered = module, segments, covered
        # In a compiled model the layers run as they are: what is run again in a backward is no part of a graph.
        # Not a decorator, which would import torch._dynamo with this file.
        self._run: Callable[..., Any] = cast("Any", torch.compiler).disable(segments.run)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as if there were no segments."""
        if self.covered is not None:
            return self.covered(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, args, kwargs)


class _Start:
    def __init__(self, segments: Segments) -> None:
        self._start: Callable[[], None] = cast("Any", torch.compiler).disable(segments.start_forward)

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002 - torch's signature
        if torch.is_grad_enabled():
            self._start()


def _is_sharded(parameter: Tensor) -> bool:
    if type(parameter.data) is Tensor:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter.data, DTensor)
