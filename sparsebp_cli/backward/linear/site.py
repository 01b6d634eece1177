"""Sites at linears: find a model's linears and override their forwards.

An override is an entry ``forward`` in a module's instance dictionary. The module's class, parameters and state_dict
keys do not change, and removing the entry restores the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from sparsebp_cli.backward.core.extension import SiteAdapter
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.linear import cuda
from sparsebp_cli.backward.linear.attention import AttentionOverride, find_attentions
from sparsebp_cli.backward.linear.compiled import LAYOUTS, register, run_in_graph
from sparsebp_cli.backward.linear.float8 import CastInput, Float8Layout, float8_class
from sparsebp_cli.backward.linear.function import (
    LinearCost,
    Needs,
    SelectionSource,
    WeightLayout,
    weight_of,
)
from sparsebp_cli.backward.linear.input_saver import SavesInputs
from sparsebp_cli.backward.linear.latest_input import LatestInput
from sparsebp_cli.backward.linear.quantized import find_layout
from sparsebp_cli.backward.linear.reading import read_before
from sparsebp_cli.backward.observe.example_rows import TIME_FIRST, UNPROVED, BatchRows, find_rows, find_time_first
from sparsebp_cli.backward.observe.internals import are_transforms_active
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, call_module, check_free, uncompiled
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import Reading, Saved, Seen, Selection, Site, Split

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import ShortForward, SiteEngine


@dataclass(frozen=True)
class FoundLinears:
    """The linears of a model: covered, not covered and excluded ones."""

    covered: tuple[tuple[str, nn.Module, WeightLayout], ...]
    not_covered: tuple[str, ...]  # names of linears with a forward or weight that the engine does not support
    excluded: tuple[str, ...]  # names of linears that the user excluded


def find_linears(model: nn.Module, exclude: Iterable[str] = ()) -> FoundLinears:
    """Return the linears of a model in its order. A shared linear has one entry, under its first name.

    ``exclude`` has globs over module names. Raises :class:`UsageError` if a pattern matches no linear.
    """
    forms = _known_forms()
    linears = {name: module for name, module in model.named_modules() if any(isinstance(module, k) for k in forms)}
    patterns = list(exclude)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise UsageError(f"exclude: {pattern!r} matches no linear layer{did_you_mean(pattern, linears)}")
    covered: list[tuple[str, nn.Module, WeightLayout]] = []
    not_covered, excluded = [], []
    for name, module in linears.items():
        # Our backward supports only exactly these forwards, since a subclass may compute something else.
        form = next((f for kind, f in forms.items() if type(module).forward is kind.forward), None)
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            excluded.append(name)
        elif (quantized := find_layout(module)) is not None:
            covered.append((name, module, quantized))
        elif form is None or not _is_plain(module):
            not_covered.append(name)
        else:
            covered.append((name, module, form(module)))
    return FoundLinears(tuple(covered), tuple(not_covered), tuple(excluded))


@final
class LinearAdapter(SiteAdapter):
    """The outputs of all covered linears; see :class:`~sparsebp_cli.backward.core.extension.SiteAdapter`.

    ``exclude`` has globs over module names. ``may_be_empty``: accept a model without linears, for policies that do not
    decide here. Without ``installs`` no linear is a site and none is changed, since counting alone costs up to 5 % of a
    step. Raises :class:`UsageError` if a pattern matches nothing or there is no linear, and :class:`UnsupportedError`
    if the model is attached or offloaded.
    """

    def __init__(
        self,
        model: nn.Module,
        exclude: Iterable[str] = (),
        *,
        may_be_empty: bool = False,
        installs: bool = True,
    ) -> None:
        self._found, layers = find_linears(model, exclude), LayerNumbers(model)
        if not installs:
            self._found = FoundLinears((), (), ())
        self.names: tuple[str, ...] = tuple(name for name, _, _ in self._found.covered)
        self._model, self._time_first = model, find_time_first(model)
        self.not_covered, self.excluded = self._found.not_covered, self._found.excluded
        self._patches = ForwardPatches()
        self._saving: SavesInputs | None = None
        self._layers = {name: layers.number_of(name) for name in self.names}
        for name, module, _ in self._found.covered:
            check_free(name, module)
        if not self.names and not may_be_empty:
            left = f"; not covered: {', '.join(self.not_covered)}" if self.not_covered else ""
            raise UsageError(f"{type(model).__name__} has no linear layer that a policy can use{left}")

    def save_by(self, saving: SavesInputs) -> None:
        """Let an extension decide the saved form of inputs. Raise :class:`UsageError` if it matches no linear."""
        saving.scope.check_patterns(self.names)
        self._saving = saving

    def install(self, engine: SiteEngine) -> None:
        norms = LatestInput[Tensor]()
        for name, module, form in self._found.covered:
            first = name in self._time_first
            layer, saving = self._layers[name], self._saving
            if saving is not None and not saving.scope.contains(name, layer):
                saving = None
            override = LinearOverride(name, module, form, engine, layer, norms, saving, time_first=first)
            self._patches.install(module, override)
        if engine.decisions.has_selectors:
            for core, name in find_attentions(self._model, self.names):
                site = Site(name, 0, (), self._layers[name])
                self._patches.install(core, AttentionOverride(core, site, engine))

    def remove(self) -> None:
        self._patches.remove()

    @property
    def sites(self) -> tuple[Site, ...]:
        """The covered linears as sites, with an empty ``batch_shape``."""
        return tuple(
            Site(name, form.sizes(weight_of(module))[0], (), self._layers[name])
            for name, module, form in self._found.covered
        )

    @property
    def linears(self) -> dict[str, tuple[nn.Module, WeightLayout]]:
        """Module and layout of each covered linear, by name."""
        return {name: (module, form) for name, module, form in self._found.covered}

    @override
    def backward_context(self, loss: Tensor) -> AbstractContextManager[None]:
        return nullcontext()


def _is_plain(module: nn.Module) -> bool:
    """Return whether a layer's weight is an ordinary tensor, not parametrized or sharded. A fake tensor of
    FakeTensorMode counts as ordinary."""
    # Do not read a parametrized weight: this would change spectral_norm's estimate, and so training. See decision 13.
    if is_parametrized(module):
        return False
    weight = weight_of(module)
    is_ordinary = type(weight.data) is Tensor or hasattr(weight.data, "fake_mode")
    return is_ordinary and not weight.is_complex() and weight.numel() > 0


_NO_KINDS = frozenset[type[Selection]]()
_NO_READINGS: Mapping[Reading, Tensor] = MappingProxyType({})
# (key of the last gradient, such as its shape; its site; its cost).
_NOTHING_YET = (None, Site("", 0, ()), LinearCost(0.0, Needs(False, False, False), LAYOUTS[0]))


class LinearOverride(ForwardOverride, SelectionSource):
    """The ``forward`` of one linear: unchanged without gradients, else through :class:`SelectedLinear`.

    ``time_first``: the linear is in a torch module with ``batch_first=False``.
    """

    name: str
    module: nn.Module
    form: WeightLayout
    engine: SiteEngine
    layer: int | None
    time_first: bool
    reference: bool

    def __init__(
        self,
        name: str,
        module: nn.Module,
        form: WeightLayout,
        engine: SiteEngine,
        layer: int | None,
        norms: LatestInput[Tensor],
        saving: SavesInputs | None = None,
        *,
        time_first: bool = False,
    ) -> None:
        self.name, self.module, self.form, self.engine, self.layer = name, module, form, engine, layer
        self.time_first, self.reference = time_first, engine.reference
        self._norms, self._reads = norms, engine.decisions.reads_at(Site(name, 0, (), layer))
        # Do not compile the computation of norms. A decorator would import torch._dynamo together with this module.
        self._run_informed = uncompiled(self._read_and_run) if self._reads else self._read_and_run
        self._saving = saving
        self._run_saving = self._save_and_run if saving is None else uncompiled(self._save_and_run)
        self._last: tuple[object, Site, LinearCost] = _NOTHING_YET
        self._number = register(self)  # the number of this site in compiled graphs
        self._fits_graph = saving is None and form in LAYOUTS

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        if self.is_removed or not (self.engine.enabled or self.form.replaces):
            output: Tensor = call_module(self.module, *args, **kwargs)
            return output
        if kwargs or len(args) != 1:  # the input may be passed by name: linear(input=x)
            args = signature(type(self.module).forward).bind(self.module, *args, **kwargs).args[1:]
        x = args[0]
        assert isinstance(x, Tensor)
        is_compiling = torch.compiler.is_compiling()
        if is_compiling and self._fits_graph and self.engine.forward is None:
            return run_in_graph(self.module, x, self._number, self.form, self._reads)
        if not torch.is_grad_enabled():
            return run_linear(self.module, x, self)
        forward, rows, sizes = self.engine.forward, None, self.engine.batch_sizes
        if not is_compiling:
            if are_transforms_active():
                _refuse_transforms(self.name)
            if sizes is not None:
                rows = find_rows(x, sizes, time_first=self.time_first)
        reads = self._reads if self.engine.enabled else frozenset[Reading]()
        saves = self._saving is not None and self.engine.enabled
        if forward is None and rows is None and not reads and not saves:
            return run_linear(self.module, x, self)
        num_rows = None if forward is None else self._count_dense_rows(x, forward)
        call = _Call(self, num_rows, rows, self.form, self.reference, self.engine, reads=reads)
        if saves:
            return self._run_saving(x, call)
        return self._run_informed(x, call) if reads else run_linear(self.module, x, call)

    def source_of(self, batch_shape: torch.Size, readings: Mapping[Reading, Tensor]) -> SelectionSource:
        """Return the source of the selection for a gradient in a compiled graph."""
        shape, sizes = tuple(batch_shape), self.engine.batch_sizes
        # The forward of a model that is compiled as a whole does not report the size of its batch.
        unknown = len(shape) == 1 and sizes is not None and shape[0] not in sizes
        why = TIME_FIRST if self.time_first else UNPROVED if unknown else ""
        reads = self._reads if self.engine.enabled else frozenset[Reading]()
        rows = BatchRows(shape, why)
        num_rows, known = self.engine.dense_rows, dict(readings)
        return _Call(self, num_rows, rows, self.form, self.reference, self.engine, reads=reads, readings=known)

    def _save_and_run(self, x: Tensor, call: _Call) -> Tensor:
        """Run the linear with the form of the input that its policy saves."""
        assert self._saving is not None
        weight = weight_of(self.module)
        site = Site(self.name, self.form.sizes(weight)[0], tuple(x.shape[:-1]), self.layer)
        kept = self._saving.save(site, x, weight, 1 - self.form.output_dim)
        return run_linear(self.module, x, replace(call, saved_share=kept.share), kept.saved)

    def _read_and_run(self, x: Tensor, call: _Call) -> Tensor:
        """Run the linear with the norms that its policy reads."""
        with torch.no_grad():
            weight_OD = self.form.by_output(self.form.restore(weight_of(self.module), x.dtype))
            call.readings.update(read_before(call.reads, x, weight_OD, self._norms))
        return run_linear(self.module, x, call)

    def _count_dense_rows(self, x: Tensor, forward: ShortForward) -> int:
        """Return the number of rows that the dense forward has for a call."""
        num_rows = x.numel() // max(1, x.shape[-1])
        # If a linear is called for parts of the positions, its first call counts for all of them.
        if forward.num_rows is not None:
            num_rows = 0 if self.name in forward.called else forward.num_rows
            forward.called.add(self.name)
        return round(num_rows * forward.scale)

    def decide(
        self, grad_NO: Tensor, batch_shape: torch.Size, num_inputs: int, needs: Needs, *_: object
    ) -> Selection | Split | None:
        """Return the policy's selection of a gradient; ``batch_shape`` is the output's without features."""
        shape, sizes = tuple(batch_shape), self.engine.batch_sizes
        unknown = len(shape) == 1 and bool(sizes) and shape[0] not in (sizes or ())  # such as in a compiled layer
        return self.decide_rows(grad_NO, BatchRows(shape, UNPROVED if unknown else ""), num_inputs, needs)

    def decide_rows(
        self,
        grad_NO: Tensor,
        rows: BatchRows,
        num_inputs: int,
        needs: Needs,
        dense_rows: int | None = None,
        readings: Mapping[Reading, Tensor] | None = None,
        saved_share: float = 1.0,
    ) -> Selection | Split | None:
        """Call the policy for a gradient. ``dense_rows`` is its number of rows in the dense backward; None: the same.
        ``saved_share`` is the fraction of wgrad's multiplications with the saved form of the input.
        """
        masked = cuda.find_masked(grad_NO) if grad_NO.is_cuda else _NO_KINDS
        key = (grad_NO.shape, rows, num_inputs, needs, saved_share, masked)
        if key != self._last[0]:  # most gradients of a site have the same shape
            site = Site(self.name, grad_NO.shape[1], rows.shape, self.layer, rows.unknown)
            flops = 2.0 * grad_NO.numel() * num_inputs
            self._last = key, site, LinearCost(flops, needs, self.form, saved_share, masked)
        _, site, work = self._last
        seen = Seen(grad_NO, needs.dgrad, needs.wgrad, readings=readings or _NO_READINGS)
        return self.engine.decisions.decide(site, seen, work, dense_rows)


@final
@dataclass(frozen=True)
class _Call(SelectionSource):
    """One call of a linear with facts that its input does not show, as a
    :class:`sparsebp_cli.backward.linear.function.SelectionSource`.
    """

    linear: LinearOverride
    num_rows: int | None  # rows of this call in the dense forward; None: as many as here
    rows: BatchRows | None  # assignment of rows to examples; None: the shape of the input shows it
    # Attributes of the linear, which the backward and the reader of graphs look up here.
    form: WeightLayout
    reference: bool
    engine: SiteEngine
    saved_share: float = 1.0  # fraction of wgrad's multiplications
    reads: frozenset[Reading] = frozenset()
    readings: dict[Reading, Tensor] = field(default_factory=dict)

    @property
    @override
    def reads_input(self) -> bool:
        return "input" in self.reads

    def decide(
        self, grad_NO: Tensor, batch_shape: torch.Size, num_inputs: int, needs: Needs, x_ND: Tensor | None = None
    ) -> Selection | Split | None:
        rows = BatchRows(tuple(batch_shape)) if self.rows is None else self.rows
        readings = self.readings
        if self.reads_input and x_ND is not None:
            readings = {**readings, "input": x_ND}
        return self.linear.decide_rows(grad_NO, rows, num_inputs, needs, self.num_rows, readings, self.saved_share)


def _refuse_transforms(name: str) -> NoReturn:
    raise UnsupportedError(
        f"torch.func (vmap, grad, jacrev) on {name!r} of an attached model is not supported: "
        "run it inside engine.disabled()"
    )


def run_linear(module: nn.Module, x: Tensor, decider: SelectionSource, saved: Saved | None = None) -> Tensor:
    """Run a linear layer by the same call that the module makes, with a backward that calls the policy. Autograd saves
    ``saved`` instead of the input.
    """
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    needs_grad = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if not (needs_grad and torch.is_grad_enabled()):
        output: Tensor = type(module).forward(module, x)
        return output
    return decider.form.apply(x, weight, bias, decider, saved)


def _known_forms() -> dict[type[nn.Module], Callable[[nn.Module], WeightLayout]]:
    linear, conv1d, matmul = LAYOUTS
    forms: dict[type[nn.Module], Callable[[nn.Module], WeightLayout]] = {nn.Linear: lambda _: linear}
    loaded = sys.modules.get("transformers.pytorch_utils")  # loaded if the model contains a Conv1D
    if loaded is not None:
        forms[loaded.Conv1D] = lambda _: conv1d
    falcon = sys.modules.get("transformers.models.falcon.modeling_falcon")
    if falcon is not None:
        forms[falcon.FalconLinear] = lambda _: matmul
    float8 = float8_class()
    if float8 is not None:
        shared = LatestInput[CastInput]()
        forms[float8] = lambda module: Float8Layout(module, shared)
    return forms
