"""One residual branch: how it runs, for all rows or for some, and what its backward costs.

Between the norm before the core and the norm after it the layer's own code does nothing, so the three can be run as one
piece. The modules pass the residual stream on untouched until the last of them, which runs the piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.branch.dropout import DropoutRecorder, DropoutTape
from sparsebp_cli.backward.decoder.kv_cache import is_filled
from sparsebp_cli.backward.decoder.layout import AttentionLayout, attention_name
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.backward.patch.forward import call_module
from sparsebp_cli.backward.patch.rng import capture_generators
from sparsebp_cli.errors import UnsupportedError

_STREAM = "hidden_states"  # what transformers calls the argument that a core computes from


@dataclass
class Call:
    """One forward of a branch: all that computing it again needs beside its input.

    Args:
        args: Positional arguments of the core after the first.
        kwargs: Keyword arguments of the core, without its input and without a cache.
        autocast: Whether autocast was on, and its dtype.
        tape: The draws of its dropouts.
        generators: The global generators at its start; None when only the tape is needed.
        whole: Why it cannot be computed again for some rows only; empty where it can.
        stores: Whether every linear's output is kept that a backward reads; else keys and values alone, if narrow.
        kept: What linears gave, by their names in the core.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[bool, torch.dtype]
    tape: DropoutTape = field(default_factory=DropoutTape)
    generators: tuple[Tensor, Tensor | None] | None = None
    whole: str = ""
    stores: bool = False
    kept: dict[str, Tensor] = field(default_factory=dict)


class Branch:
    """A residual branch of one layer.

    Args:
        name: Of the core in the model: the site's name.
        core: The attention or MLP.
        last: Name of the core's last linear.
        before: The norm whose output the core reads, if the branch includes one.
        after: The norm that reads the core's output, if there is one.
        attention: The linears of an attention; None for a core that computes each position on its own.
        layer: Number of the decoder layer.
    """

    def __init__(
        self,
        name: str,
        core: nn.Module,
        last: str,
        before: nn.Module | None,
        after: nn.Module | None,
        attention: AttentionLayout | None,
        layer: int | None,
    ) -> None:
        self.name, self.core, self.before, self.after = name, core, before, after
        self.last, self.attention, self.layer = last, attention, layer
        self.linears = find_linears(core).covered
        self.keeps_keys = attention is not None and self._keys_are_narrow(attention)
        self.parts = [part for part in (before, core, after) if part is not None]
        self.dropouts = DropoutRecorder(*self.parts)

    def _keys_are_narrow(self, attention: AttentionLayout) -> bool:
        """Whether keys and values together are no wider than the residual stream, which is kept anyway."""
        widths = [
            form.by_output(cast("Tensor", module.weight)).shape
            for name, module, form in self.linears
            if name.removesuffix(".base_layer") in attention.key_value
        ]
        return sum(width[0] for width in widths) <= max((width[1] for width in widths), default=0)

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of all parts, each once."""
        trained = (p for part in self.parts for p in part.parameters() if p.requires_grad)
        return list({id(p): p for p in trained}.values())

    def enter(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call that begins with these arguments of the core.

        Args:
            x: The residual stream.
            args: Positional arguments after the first.
            kwargs: Keyword arguments.

        Returns:
            The call, its generators noted where they will be needed.

        Raises:
            UnsupportedError: The attention is given keys and values that it does not compute.
        """
        device = x.device.type
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        call = Call(args, {k: v for k, v in kwargs.items() if k != _STREAM}, autocast)
        if self.attention is not None:
            if is_filled(call.kwargs.get(self.attention.cache), self.core):
                raise UnsupportedError(
                    f"{self.name!r} is given keys and values of earlier positions; branches compute without them"
                )
            call.kwargs[self.attention.cache] = None
            call.whole = (
                "its attention has dropout"
                if _draws_attention(self.core)
                else _find_unknown(self.core, args, call.kwargs)
            )
        if call.whole and self.core.training:
            call.generators = capture_generators(x.device)
        return call

    def run(self, x: Tensor, call: Call, **changes: Any) -> Tensor:
        """Run all parts.

        Args:
            x: The residual stream, or rows of it.
            call: The core's other arguments.
            **changes: Arguments that differ from the call's.

        Returns:
            What is added to the residual stream.
        """
        if self.before is not None:
            x = call_module(self.before, x)
        return self.finish(self.run_core(x, call, **changes))

    def run_core(self, x: Tensor, call: Call, **changes: Any) -> Tensor:
        """Run the core alone, on what the norm before it gives."""
        output = call_module(self.core, x, *call.args, **(call.kwargs | changes))
        return cast("Tensor", output[0] if isinstance(output, tuple) else output)

    def finish(self, x: Tensor) -> Tensor:
        """Run the norm after the core, if there is one."""
        return x if self.after is None else cast("Tensor", call_module(self.after, x))


def autocast_as(call: Call, device: torch.device) -> torch.autocast:
    """Return autocast as it was in a call's forward."""
    enabled, dtype = call.autocast
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _draws_attention(core: nn.Module) -> bool:
    """Whether the attention's probabilities are dropped out: their mask cannot be drawn again for some queries."""
    if not core.training:
        return False
    rates = (getattr(core, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout"))
    return any((rate.p if isinstance(rate, nn.Dropout) else rate) > 0.0 for rate in rates)


_KNOWN = {"attention_mask", "position_embeddings", "position_ids"}


def _find_unknown(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say which argument cannot be cut down to some rows; empty when all can."""
    if args:
        return "its arguments come without names"
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        return "its attention_mask is not of four dimensions"
    if mask is None and attention_name(core) not in ("eager", "sdpa"):
        return f"which keys {attention_name(core)} looks at without a mask is not known"
    if positions is not None and not (isinstance(positions, tuple) and all(p.dim() == 3 for p in positions)):
        return "its position_embeddings are not of three dimensions"
    rest = {k: v for k, v in kwargs.items() if k not in _KNOWN}
    unknown = [k for k, v in rest.items() if isinstance(v, Tensor) and v.dim() > 0]  # one number is the same for all
    if rest.get("is_causal") is not None:
        unknown.append("is_causal")
    return f"it takes {unknown[0]}" if unknown else ""
