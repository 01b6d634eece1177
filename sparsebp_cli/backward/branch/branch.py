"""One residual branch: running it for all rows or for some.

A branch consists of an optional norm, a core (attention or MLP), and an optional second norm. The layer's own code
computes nothing between them, so the three can run as one piece: the first modules pass the residual stream through
unchanged, and the last one runs the whole piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.branch.dropout import DropoutRecorder, DropoutTape
from sparsebp_cli.backward.decoder.decoder import argument_names, attention_name, dropout_rates
from sparsebp_cli.backward.decoder.kv_cache import is_filled
from sparsebp_cli.backward.decoder.layout import AttentionLayout, BranchLayout
from sparsebp_cli.backward.linear.function import WeightLayout, weight_of
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.backward.patch.forward import call_module
from sparsebp_cli.backward.patch.rng import capture_generators
from sparsebp_cli.errors import UnsupportedError

STREAM = "hidden_states"  # transformers' name of the core's input


@dataclass
class Call:
    """Everything besides its input that is needed to run one forward of a branch again."""

    args: tuple[object, ...]  # positional arguments of the core after the first
    kwargs: dict[str, object]  # without the core's input and without a key/value cache
    autocast: tuple[bool, torch.dtype]  # enabled, and its dtype
    tape: DropoutTape = field(default_factory=DropoutTape)
    generators: tuple[Tensor, Tensor | None] | None = None  # state at the start; None: the tape is enough
    whole_reason: str = ""  # why it cannot be recomputed for some rows only; empty where it can
    stores: bool = False  # store every linear's output that the backward reads; else only narrow keys and values
    kept: dict[str, Tensor] = field(default_factory=dict)  # outputs of linears, by their names in the core


class Branch:
    """A residual branch of one layer.

    Args:
        name: Name of the core in the model; also the site's name.
        core: The attention or MLP.
        before: The norm whose output the core reads, if the branch includes one.
        after: The norm that reads the core's output, if there is one.
        layout: Names of its modules in the layer, and how the layer adds its output.
        layer: Number of the decoder layer.

    Attributes:
        last: Name of the core's last linear; None, or a name that it lacks: there is none.
        attention: The attention's linears; None for a core that computes each position independently.
        num_outputs: Number of values that the core's forward returns; 0: it returns a tensor.
        is_written: Whether the layer changes the core's output in place.
        adds: The argument of the core's forward that it adds to its output; None: there is none.
    """

    name: str
    core: nn.Module
    before: nn.Module | None
    after: nn.Module | None
    last: str | None
    attention: AttentionLayout | None
    layer: int | None
    num_outputs: int
    is_written: bool
    adds: str | None
    linears: tuple[tuple[str, nn.Module, WeightLayout], ...]
    keeps_keys: bool
    parts: list[nn.Module]
    dropouts: DropoutRecorder

    def __init__(
        self,
        name: str,
        core: nn.Module,
        before: nn.Module | None,
        after: nn.Module | None,
        layout: BranchLayout,
        layer: int | None,
    ) -> None:
        self.name, self.core, self.before, self.after = name, core, before, after
        self.last, self.layer, self.is_written, self.adds = layout.last, layer, layout.is_written, layout.adds
        attention = layout.attention
        # transformers' attentions return a tuple: their output and the weights of the attention.
        self.num_outputs = layout.num_outputs or 2 * (attention is not None)
        # The class of the core may know the cache by the older of transformers' two names.
        self.attention = None if attention is None else attention.fitted(argument_names(core))
        self.linears = find_linears(core).covered
        self.keeps_keys = attention is not None and self._keys_are_narrow(attention)
        self.parts = [part for part in (before, core, after) if part is not None]
        self.dropouts = DropoutRecorder(*self.parts)

    def _keys_are_narrow(self, attention: AttentionLayout) -> bool:
        """Whether keys and values together are no wider than the residual stream, which is stored in any case."""
        widths = [
            form.sizes(weight_of(module))
            for name, module, form in self.linears
            # peft puts the adapted linear into a child `base_layer`.
            if name.removesuffix(".base_layer") in attention.key_value
        ]
        return sum(width[0] for width in widths) <= max((width[1] for width in widths), default=0)

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of all parts, each once."""
        trained = (p for part in self.parts for p in part.parameters() if p.requires_grad)
        return list({id(p): p for p in trained}.values())

    def enter(self, x: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> Call:
        """Return a record of the forward that starts with these arguments, with generator states where they are needed
        later.

        Raises :class:`UnsupportedError` if a non-empty key/value cache is passed in.
        """
        device = x.device.type
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        call = Call(args, {k: v for k, v in kwargs.items() if k != STREAM}, autocast)
        self.check_cache(kwargs)
        if self.attention is not None:
            # The first run would fill an empty cache, and the second would find it filled.
            call.kwargs[self.attention.cache] = None
        call.whole_reason = self.find_whole_reason(args, call.kwargs)
        if call.whole_reason and self.core.training:
            call.generators = capture_generators(x.device)
        return call

    def check_cache(self, kwargs: Mapping[str, object]) -> None:
        """Raise :class:`UnsupportedError` if a key/value cache that is not empty is among the core's arguments."""
        if self.attention is not None and is_filled(kwargs.get(self.attention.cache), self.core):
            raise UnsupportedError(
                f"{self.name!r} got a key/value cache with earlier positions; sites='branches' needs an empty cache"
            )

    def find_whole_reason(self, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        """Return why a forward with these arguments cannot be recomputed for some rows only; empty where it can."""
        if self.attention is None:
            return "it drops out by a function" if _drops_by_function(self.core) else ""
        if _has_attention_dropout(self.core) or _drops_by_function(self.core):
            return "its attention has dropout"
        return self.find_unsupported(args, kwargs)

    def find_unsupported(self, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        """Do the same for a forward without dropout."""
        if self.attention is None:
            return ""
        if not self.attention.some_queries:
            return "its attention computes the queries of all positions or none"
        return _find_unsupported(self.core, args, kwargs, self.attention.bias)

    def run(self, x: Tensor, call: Call, **changes: object) -> Tensor:
        """Run all parts on the residual stream or on rows of it; ``changes`` override the call's keyword arguments.

        Returns what is added to the residual stream.
        """
        if self.before is not None:
            x = call_module(self.before, x)
        return self.finish(self.run_core(x, call, **changes))

    def run_core(self, x: Tensor, call: Call, **changes: object) -> Tensor:
        """Run the core alone on the output of the norm before it."""
        output = call_module(self.core, x, *call.args, **(call.kwargs | changes))
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def finish(self, x: Tensor) -> Tensor:
        """Run the norm after the core, if there is one."""
        if self.after is not None:
            x = call_module(self.after, x)
        return x


def autocast_as(call: Call, device: torch.device) -> torch.autocast:
    """Return an autocast context with the settings of a call's forward."""
    enabled, dtype = call.autocast
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _has_attention_dropout(core: nn.Module) -> bool:
    """Whether attention probabilities are dropped out: their mask cannot be redrawn for a subset of the queries."""
    if not core.training:
        return False
    # llama has the rate itself, gpt2 a module attn_dropout, and opt calls the rate dropout.
    rates = (getattr(core, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout"))
    return any((rate.p if isinstance(rate, nn.Dropout) else rate) > 0.0 for rate in rates)


def _drops_by_function(core: nn.Module) -> bool:
    """Whether a core drops out without a module whose draws are on the tape."""
    parts = [part for part in core.modules() if not isinstance(part, nn.Dropout)]
    return core.training and any(rate > 0.0 for part in parts for rate in dropout_rates(part))


_KNOWN = {"attention_mask", "position_embeddings", "position_ids"}


def _find_unsupported(core: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], bias: str | None) -> str:
    """Name the argument that cannot be restricted to some rows; empty when all can, or need not as a bias of keys."""
    if args:
        return "its arguments come without names"
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        return "its attention_mask is not of four dimensions"
    if mask is None and attention_name(core) not in ("eager", "sdpa"):
        return f"which keys {attention_name(core)} looks at without a mask is not known"
    positions = (positions,) if isinstance(positions, Tensor) else positions
    if positions is not None and not (isinstance(positions, tuple) and all(p.dim() == 3 for p in positions)):
        return "its position_embeddings are not of three dimensions"
    rest = {k: v for k, v in kwargs.items() if k not in _KNOWN | {bias}}
    unknown = [k for k, v in rest.items() if isinstance(v, Tensor) and v.dim() > 0]  # a scalar applies to every row
    # sdpa aligns is_causal at the first position, which is wrong once there are fewer queries than keys.
    if rest.get("is_causal") is not None:
        unknown.append("is_causal")
    return f"it takes {unknown[0]}" if unknown else ""
