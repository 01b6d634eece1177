"""Layers that mix neighbouring positions of a text, on packed rows: short convolutions, linear attention, state spaces.

Such a layer reads earlier rows of its text as a state. Transformers continues a text from the states in a cache. So the
layer runs once for each run of segments: those that begin a text without a cache, the others with a cache that contains
the states at the end of their parents. States are part of the graph, so the gradient of a shared prefix is the sum over
its continuations.

The layout reaches the layers as an argument of the model, since activation checkpointing passes arguments again.

Shape letters: N computed rows, S segments of a run, L rows of a segment, D width, C channels, K columns of a state.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sparsebp_cli.backward.kind.packing.attention import LAYOUT, layout_now
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, uncompiled
from sparsebp_cli.errors import UnsupportedError

if TYPE_CHECKING:
    from sparsebp_cli.backward.kind.packing.layout import PackedLayout


_Key = tuple[int, int]  # numbers of the layer and of the state in it


@dataclass
class SegmentStates:
    """A cache of transformers that contains the states of one layer for the segments of one run. Its methods have the
    parameters of ``transformers.Cache``.

    Args:
        conv: The last columns (S, C, K) of each convolution before the segments; empty: none.
        recurrent: The state of each recurrence before the segments; empty: none.
        kept: The same at the end of the segments, as the layer computes them.
    """

    conv: Mapping[_Key, Tensor]
    recurrent: Mapping[_Key, Tensor]
    kept: tuple[dict[_Key, Tensor], dict[_Key, Tensor]] = field(default_factory=lambda: ({}, {}))

    @property
    def is_complete(self) -> bool:
        """Whether the layer kept the state of each convolution, and of each recurrence that it was given."""
        convolutions, recurrences = self.kept
        return (
            bool(convolutions)
            and self.conv.keys() <= convolutions.keys()
            and self.recurrent.keys() <= recurrences.keys()
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(f"lossless does not support this model: its layers read {name} of the key/value cache")

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the columns before the segments; None: they begin a text."""
        return self.conv.get((layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state before the segments; None: they begin a text."""
        return self.recurrent.get((layer_idx, state_idx))

    def is_recording_past(self, _: int) -> bool:
        """Return True: layers then do not update states in place."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Return the columns before the segments and their own, and keep the last ones."""
        before = self.conv.get((layer_idx, state_idx))
        whole = conv_states if before is None else torch.cat((before, conv_states), -1)
        last = whole[..., -conv_kernel_size:]
        self.kept[0][layer_idx, state_idx] = pad(last, (conv_kernel_size - last.shape[-1], 0))
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Keep the state at the end of the segments."""
        self.kept[1][layer_idx, state_idx] = recurrent_states
        return recurrent_states


@final
class Mixer(ForwardOverride):
    """The ``forward`` of a layer that mixes neighbouring positions."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._run = uncompiled(self._run_segments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on a plain batch, or on packed rows."""
        layout = kwargs.pop(LAYOUT, None)
        if self.is_removed or (layout is None and layout_now() is None):
            return self.run_covered(self._module, *args, **kwargs)
        names = list(inspect.signature(type(self._module).forward).parameters)[1:]
        return self._run(layout, dict(zip(names, args, strict=False)) | kwargs)

    def _run_segments(self, layout: PackedLayout | None, given: dict[str, Any]) -> Tensor:
        hidden = given.pop("hidden_states", None)
        if layout is None or not isinstance(hidden, Tensor) or hidden.shape[:2] != (1, layout.num_rows):
            raise UnsupportedError(
                f"lossless does not support {type(self._module).__name__} in this model: the module mixes neighbouring "
                "positions, but gets only some positions of the batch"
            )
        outputs, states = list[Tensor](), list[SegmentStates]()
        for run in layout.mixing.runs:
            rows = hidden[0].index_select(0, run.row_SL.flatten()).view(*run.row_SL.shape, -1)
            rows = rows if run.attends else torch.zeros_like(rows)
            cache = SegmentStates(_take_states(states, run.before, 0), _take_states(states, run.before, 1))
            states.append(cache)
            given |= {"cache": cache if run.before or run.is_read else None, "attention_mask": None}
            outputs.append(self.run_covered(self._module, hidden_states=rows, **given).flatten(0, 1))
            if run.is_read and not cache.is_complete:
                raise UnsupportedError(f"lossless does not support {type(self._module).__name__}: it caches no state")
        return torch.cat(outputs).index_select(0, layout.mixing.place_N)[None]


def _take_states(states: Sequence[SegmentStates], before: Sequence[tuple[int, int]], kind: int) -> dict[_Key, Tensor]:
    """Return the states (S, ...) at the end of the parents of the segments of a run."""
    names = states[before[0][0]].kept[kind] if before else ()
    return {name: torch.stack([states[run].kept[kind][name][number] for run, number in before]) for name in names}


def find_mixers(stack: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that mix neighbouring positions and can continue from the states in a cache."""
    return [module for module in stack.modules() if _continues(type(module))]


def _continues(kind: type[nn.Module]) -> bool:
    """Return whether the forward of a class continues a text from the states in a cache, by the names in its code.
    Recurrences without an initial state, such as the scan of Mamba 1, can only go on token by token."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    names, constants = getattr(code, "co_names", ()), getattr(code, "co_consts", ())
    keywords = {word for words in constants if isinstance(words, tuple) for word in words}
    begins = "get_recurrent_state" not in names or bool(keywords & {"initial_state", "initial_states"})
    takes = "cache" in inspect.signature(kind.forward).parameters
    return takes and begins and "update_conv_state" in names and "conv_kernel_size" in keywords


def install_mixers(patches: ForwardPatches, modules: Sequence[nn.Module]) -> None:
    """Override the layers of a model that mix neighbouring positions."""
    for module in modules:
        patches.install(module, Mixer(module))
