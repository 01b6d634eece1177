"""Segments in a model whose own forward runs its layers, for ``attach(model, policies, segments=...)``.

The layers of all segments but the last run without a graph. The last layer of each returns its output through an
autograd Function that stores the segment's arguments; its backward runs the layers again with a graph and
differentiates them. Parameters are inputs of that Function, so autograd itself sums their gradients over segments that
share them, over micro-batches and over processes, and hooks run once, after the last contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten
from torch.utils.hooks import RemovableHandle

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.execution.segment.function import SegmentFunction, SegmentWork
from sparsebp_cli.backward.execution.segment.recorded_forward import RecordedForward
from sparsebp_cli.backward.execution.segment.split import LayerSequence, find_layers, split_layers
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, NotCopyable, uncompiled
from sparsebp_cli.errors import UnsupportedError

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView


@final
class Segments(EngineExtension):
    """The segments of one model.

    Segments are a way to execute a step, not a policy, so they stay active while policies are disabled. So, as with
    checkpointing, dense pass and policy are compared under the same execution.

    Args:
        model: The model; its list of layers is found automatically.
        segments: The number of segments, or the first module of each.

    Raises:
        UsageError: There are fewer layers than segments, or the names are not layers in their order.
        UnsupportedError: The model has no list of layers, or its layers are checkpointed or skipped at random.
    """

    def __init__(self, model: nn.Module, segments: int | Sequence[str]) -> None:
        self._layers: LayerSequence = find_layers(model)
        self.segments: tuple[range, ...] = split_layers(segments, self._layers)
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False):
                where = f" (at {name!r})" if name else ""
                raise UnsupportedError(
                    f"segments do not support activation checkpointing{where} in the same model: "
                    "switch checkpointing off, since segments also recompute layers"
                )
        dropped = getattr(self._layers.owner, "layerdrop", 0.0)  # an attribute of transformers' speech models and BART
        if isinstance(dropped, float | int) and dropped > 0.0:
            name = type(self._layers.owner).__name__
            raise UnsupportedError(f"segments: {name} skips layers at random (layerdrop={dropped}): set layerdrop to 0")
        self._checked: set[str] = set()  # segments whose layers use only their own parameters and arguments
        self._model, self._trained = model, list[bool]()  # which parameters the model trained in the last forward
        self._position = -1  # position of the layer that ran last in this forward
        self._recorded: RecordedForward | None = None
        self._hook: RemovableHandle | None = None
        self._patches = ForwardPatches()

    def install(self, engine: EngineView) -> None:
        names = self._layers.names
        starts = ", ".join(names[part[0]] for part in self.segments)
        engine.notes["segments"] = f"the segments begin with {starts}; the backward recomputes all except the last"
        self._hook = self._layers.owner.register_forward_pre_hook(_StartHook(self))
        # A shared module occurs several times, but override it only once.
        for module in dict.fromkeys(self._layers.modules):
            self._patches.install(module, LayerOverride(module, self))

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._patches.remove()

    def start_forward(self) -> None:
        """Reset to the first layer, even if the previous forward was interrupted."""
        self._position, self._recorded = -1, None

    def run(self, layer: LayerOverride, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a layer according to its position in a segment, and return its output."""
        if not torch.is_grad_enabled():
            return layer.plain(*args, **kwargs)
        try:
            self._position = position = self._find_position(layer.module)
            segment = next(part for part in self.segments if position in part)
            if segment is self.segments[-1]:
                return layer.plain(*args, **kwargs)
            if position == segment[0]:
                self._recorded = self._open(segment)
            assert self._recorded is not None
            recorded = self._recorded
            output = recorded.run(layer.plain, args, kwargs)
            if position < segment[-1]:
                return output
            self._recorded = None
            return self._close(recorded, output)
        except BaseException:
            self.start_forward()
            raise

    def _find_position(self, module: nn.Module) -> int:
        modules = self._layers.modules
        follows = (self._position + 1) % len(modules)
        if modules[follows] is module:
            return follows
        if self._recorded is None and modules[0] is module:  # the layers were called without their owner's forward
            return 0
        names = self._layers.names
        raise UnsupportedError(
            f"segments: layer {names[modules.index(module)]!r} ran where {names[follows]!r} was expected: "
            "segments do not support layers that are skipped or run in another order"
        )

    def _open(self, segment: range) -> RecordedForward:
        names, modules = self._layers.names, self._layers.modules
        if segment is self.segments[0]:
            # Check in each forward, since FSDP2 shards the weights after attach. See decision 14.
            if any(_is_sharded(p) for module in modules for p in module.parameters()):
                raise UnsupportedError("segments do not support sharded weights (FSDP2): use DDP")
            trained = [p.requires_grad for p in self._model.parameters()]
            if trained != self._trained:  # a layer may use a parameter from outside that was frozen before
                self._checked.clear()
                self._trained = trained
        return RecordedForward([names[n] for n in segment], [modules[n] for n in segment])

    def _close(self, recorded: RecordedForward, output: object) -> object:
        leaves, places, spec = recorded.finish(output)
        given = recorded.release()
        # Leaves refuse gradients inside a segment. Outputs of the segment get its node below.
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if places and any(t.requires_grad for t in (*given, *recorded.parameters)):
            work = SegmentWork(recorded, tuple(places), len(given), self._checked)
            # Parameters are inputs of the node, so autograd sums their gradients, and hooks on them need no code for
            # segments. See decision 18.
            results = SegmentFunction.apply(work, [leaves[n] for n in places], *given, *recorded.parameters)  # type: ignore[no-untyped-call]
            for place, result in zip(places, results, strict=True):
                leaves[place] = result
        return tree_unflatten(leaves, spec)


class LayerOverride(ForwardOverride):
    """The ``forward`` of one layer."""

    module: nn.Module
    segments: Segments

    def __init__(self, module: nn.Module, segments: Segments) -> None:
        self.module, self.segments = module, segments
        # torch.compile cannot trace a Function that reruns layers in its backward. As a decorator, disable would import
        # torch._dynamo together with this module.
        self._run = uncompiled(segments.run)

    def plain(self, *args: object, **kwargs: object) -> object:
        """Run the layer without segments."""
        return self.run_covered(self.module, *args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.plain(*args, **kwargs) if self.is_removed else self._run(self, args, kwargs)


class _StartHook(NotCopyable):
    def __init__(self, segments: Segments) -> None:
        self._start = uncompiled(segments.start_forward)

    def __call__(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._start()


def _is_sharded(parameter: Tensor) -> bool:
    # Recognise a plain tensor without importing torch.distributed.tensor.
    if type(parameter.data) is Tensor:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter.data, DTensor)
