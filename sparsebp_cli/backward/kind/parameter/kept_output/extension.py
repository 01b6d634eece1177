"""Frozen lower layers that run once for each example: at its other visits the last one returns what it returned then.

All frozen layers but the last pass their input on and note what they were given; the last one finds what is known of
the batch, runs all of them for the rest, and returns both. Nothing is taken from another batch before it was shown, on
this machine and for this shape, that the bits of an example do not depend on its neighbours: a product of another shape
may add up in another order. See decision 122.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsebp_cli.backward.core.report import OutputUse
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.kind.parameter.extension import HasEmbeddings, find_parameters
from sparsebp_cli.backward.kind.parameter.kept_output.calls import Call, LayerCalls, hidden_of
from sparsebp_cli.backward.kind.parameter.kept_output.context import FrozenContext
from sparsebp_cli.backward.kind.parameter.kept_output.form import Encoded, RoundingError, encode
from sparsebp_cli.backward.kind.parameter.kept_output.store import DiskStore, MemoryStore, OutputStore
from sparsebp_cli.backward.observe.flops import PassEstimate, counting_now
from sparsebp_cli.backward.observe.internals import parameter_of
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, NotCopyable
from sparsebp_cli.errors import PolicyError, UnsupportedError, UsageError
from sparsebp_cli.policy import ParameterSelector

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given
    from sparsebp_cli.backward.observe.flops import DensePass
    from sparsebp_cli.policy import Step
    from sparsebp_cli.policy.kept_output import KeptOutputs

FOLDER = "kept-outputs"  # of the training's folder
RECHECK = 64  # batches of one shape from known outputs, after which, and after twice as many, one is computed as well
SQUARES = ("attention", "bmm")  # operators whose products grow with the square of the length
Shape = tuple[int, int, int]  # examples that are computed, examples, positions


@final
class OutputExtension:
    """The kept outputs of one model; see :class:`~sparsebp_cli.backward.core.extension.EngineExtension`.

    Raises :class:`PolicyError` if the first layer or the embeddings are trained, :class:`UnsupportedError` for a model
    whose frozen layers draw random numbers or have hooks, and :class:`UsageError` without a folder where one is needed.
    """

    _engine: EngineView

    def __init__(self, policy: ParameterSelector, kept: KeptOutputs, model: nn.Module, given: Given) -> None:
        self._name, self._kept, self._model = type(policy).__name__, kept, model
        names, layers = _find_frozen(policy, model, given)
        self.layers = names
        self._modules = layers
        self._context = FrozenContext(names, layers)
        self._context.refuse_random()
        self._context.refuse_hooks()
        # A forecast runs a step without data, where nothing can be compared: it is that of a first visit.
        self._is_fake = any(hasattr(p.data, "fake_mode") for layer in layers for p in layer.parameters())
        self._store = _make_store(kept, given.folder, self._name)
        self._patches, self._handles = ForwardPatches(), list[RemovableHandle]()
        self._calls: list[Call] = []  # of the forward under way
        self._passed: object = None  # what the layer that ran last has returned
        self._tuples: list[bool] = []  # whether a layer returns a tuple, once each has run
        self._rng: tuple[Tensor, ...] = ()  # where the random generators stood when the forward began
        self._even: dict[Shape, bool] = {}  # whether outputs of this shape did not depend on the neighbours
        self._num_used: Counter[Shape] = Counter()
        self._context_of_even = b""
        self._cost: tuple[float, float] | None = None  # FLOPs of the layers by position, and by its square
        self._use, self._error = OutputUse(), RoundingError()
        self._last: tuple[float, float] = (1.0, 0.0)  # of the last forward: share of examples that ran, FLOPs left out

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        what = self.layers[-1] if len(self.layers) == 1 else f"{self.layers[-1]}, the last of {len(self.layers)} frozen"
        form = "" if self._kept.form == "exact" else f", in {self._kept.form}"
        engine.notes["kept outputs"] = (
            f"the output of {what}, is kept for each example{form}: {self._kept.place}, {self._kept.max_bytes:,} bytes "
            "at most"
        )
        self._handles = [self._model.register_forward_pre_hook(_StartHook(self), with_kwargs=True)]
        for number, module in enumerate(self._modules):
            self._patches.install(module, _LayerOverride(module, number, self))

    def remove(self) -> None:
        self._patches.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def enable(self, enabled: bool) -> None:
        """Do nothing: each forward asks the engine."""

    def start_step(self, step: Step) -> None:
        """Do nothing: outputs do not depend on the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the layers cost, so that a resumed run can price what they leave out."""
        return {"frozen_cost": None if self._cost is None else list(self._cost)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        cost = state["frozen_cost"]
        self._cost = None if cost is None else (float(cost[0]), float(cost[1]))

    def claim(self, dense: DensePass) -> PassEstimate:
        """Claim of the forward what the last pass over the same batch has run; see
        :class:`~sparsebp_cli.backward.core.extension.EstimatesFlops`."""
        inside = [name for name in dense.flops.forward if name.startswith(tuple(f"{layer}." for layer in self.layers))]
        return PassEstimate(forward=dict.fromkeys((*inside, *self.layers), self._last[0]))

    @property
    def left_out(self) -> float:
        """FLOPs that the last forward did not execute; see
        :class:`~sparsebp_cli.backward.core.extension.KeepsOutputs`.
        """
        return self._last[1]

    def take_use(self) -> OutputUse:
        """Return what was known and left out in training since the last call."""
        use, self._use = self._use, OutputUse()
        return replace(use, num_bytes=self._store.num_bytes, relative_error=self._error.relative)

    def start_forward(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a forward whose caller reads what is between the layers."""
        if not self._acts:
            return
        config = getattr(self._model, "config", None)
        for option in ("output_hidden_states", "output_attentions"):
            if kwargs.get(option, getattr(config, option, False)):
                raise UnsupportedError(
                    f"{self._name} keeps outputs of frozen layers, and {option} reads what is between them, which is "
                    "not computed again: leave it out"
                )
        self._rng = _read_rng()

    def run(self, override: _LayerOverride, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a frozen layer, or put it off until the last of them knows what is kept."""
        if not self._acts or self._context.trains:
            return override.plain(*args, **kwargs)
        number, last = override.number, len(self._modules) - 1
        call = Call(self.layers[number], override.plain, args, kwargs)
        if number == 0:
            self._calls = []
            if len(self._tuples) <= last:
                self._tuples = []
        self._check(call, number)
        self._calls.append(call)
        whole = None
        if len(self._tuples) <= last:  # the first forward of all shows what the layers return
            output = override.plain(*args, **kwargs)
            whole = _check_output(output, call.name)
            self._tuples.append(isinstance(output, tuple))
            self._passed = whole
            if number < last:
                return output
        elif number < last:
            self._passed = call.hidden
            return self._wrap(call.hidden, number)
        try:
            result = self._finish(LayerCalls(self._calls), whole)
        finally:
            self._calls, self._passed = [], None
        return self._wrap(result, number)

    @property
    def _acts(self) -> bool:
        return not self._is_fake and self._engine.enabled and self._model.training and torch.is_grad_enabled()

    def _wrap(self, hidden: object, number: int) -> object:
        return (hidden,) if self._tuples[number] else hidden

    def _check(self, call: Call, number: int) -> None:
        """Refuse a call that is not that of the next layer with the output of the one before."""
        hidden = call.hidden
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise UnsupportedError(
                f"{self._name} keeps outputs by example: {call.name} gets no tensor of examples, positions and width"
            )
        if len(self._calls) != number or (number and hidden is not self._passed):
            raise UnsupportedError(
                f"{self._name} keeps outputs of layers that follow one another, and {call.name} does not get what the "
                "layer before it has returned"
            )
        if hidden.requires_grad:
            raise UnsupportedError(
                f"{self._name} keeps outputs of frozen layers, and what {call.name} gets is trained: freeze all before "
                "it, such as the embeddings"
            )
        if number == 0 and any(map(_differs, self._rng, _read_rng())):
            raise UnsupportedError(
                f"{self._name} keeps outputs by example, and what {call.name} gets is drawn anew in each forward: set "
                "dropout and noise of the embeddings to 0"
            )

    def _finish(self, calls: LayerCalls, whole: Tensor | None) -> Tensor:
        """Return the output of the frozen layers for a batch, ``whole`` if it was computed before."""
        context, probes = self._context.digest(), self._engine.is_probing
        self._context.refuse_random()  # rates may be other ones now
        if context != self._context_of_even:
            self._context_of_even, self._even = context, {}
            self._num_used.clear()
        if not probes:
            self._store.begin(context)
        keys = calls.keys(context)
        found = [self._store.get(key) for key in keys]
        known = {row: one.decode() for row, one in enumerate(found) if one is not None}
        missing = [row for row in range(calls.num_examples) if row not in known]
        batch = _Batch(calls, whole, known, missing)
        result = self._compute(batch, probes=probes)
        if whole is not None and any(map(_differs, self._rng, _read_rng())):
            raise UnsupportedError(f"{self._name} keeps outputs of frozen layers, and these draw random numbers")
        executed = batch.num_executed / calls.num_examples
        self._last = (executed, (1.0 - executed) * calls.num_examples * self._price(calls.length))
        if not probes:
            self._keep(keys, batch, result)
            num_known = 0 if batch.is_whole else len(known)
            self._use = self._use.add(calls.num_examples, num_known, self._last[1])
        return result

    def _compute(self, batch: _Batch, *, probes: bool) -> Tensor:
        """Return outputs, of which those that are known are taken only where that was shown to change no bit."""
        shape, num_missing = batch.shape, len(batch.missing)
        if num_missing == batch.calls.num_examples:
            whole = self._run(batch, None)
            nobody_missing = (0, *shape[1:])
            if not probes and nobody_missing not in self._even and not self._store.problem:
                self._even[nobody_missing] = self._is_even(batch, whole)
            return self._round(batch, whole, batch.missing)
        count = self._num_used[shape] + 1
        is_due = count >= RECHECK and not count & (count - 1)
        if self._even.get(shape) and (probes or not is_due):
            if not probes:
                self._num_used[shape] = count
            return self._join(batch)
        result = self._round(batch, self._run(batch, None), range(batch.calls.num_examples))
        if not probes and self._even.get(shape, True):
            self._even[shape] = torch.equal(self._join(batch), result)
            self._num_used[shape] = count
            if not self._even[shape]:
                self._tell_uneven(shape)
        return result

    def _run(self, batch: _Batch, rows: Sequence[int] | None) -> Tensor:
        """Run the layers, for all examples or some, and count what they cost if somebody counts."""
        number = batch.calls.num_examples if rows is None else len(rows)
        batch.num_executed += number
        if rows is None:
            batch.is_whole = True
            if batch.whole is not None:
                return batch.whole
        count = counting_now() if self._engine.is_probing else None
        before = Counter() if count is None else Counter(count.by_operator)
        result = batch.calls.compute(rows)
        if count is not None:
            spent = {name: flops - before[name] for name, flops in count.by_operator.items()}
            squares = sum(flops for name, flops in spent.items() if any(part in name for part in SQUARES))
            rows_of_all, length = number * batch.calls.length, batch.calls.length
            self._cost = ((sum(spent.values()) - squares) / rows_of_all, squares / (rows_of_all * length))
        return result

    def _is_even(self, batch: _Batch, whole: Tensor) -> bool:
        """Whether examples in another order have the same outputs, to the last bit."""
        number = batch.calls.num_examples
        if number == 1:
            return True
        order = [*range(1, number), 0]
        with torch.no_grad():
            is_even = torch.equal(self._run(batch, order), whole[torch.tensor(order, device=whole.device)])
        if not is_even:
            self._tell_uneven((0, *batch.shape[1:]))
        return is_even

    def _join(self, batch: _Batch) -> Tensor:
        """Return what is known beside what is computed, in the order of the batch."""
        device = batch.calls.hidden_BTD.device
        rows = {row: output.to(device) for row, output in batch.known.items()}
        if batch.missing:
            computed = self._round(batch, self._run(batch, batch.missing), batch.missing)
            rows |= dict(zip(batch.missing, computed, strict=True))
        return torch.stack([rows[row] for row in range(batch.calls.num_examples)])

    def _round(self, batch: _Batch, output_BTD: Tensor, rows: Sequence[int]) -> Tensor:
        """Return outputs of some rows as they are kept: a first visit then equals the others, and a resumed run one
        that was never killed."""
        if self._kept.form == "exact":
            return output_BTD
        for row, output_TD in zip(rows, output_BTD, strict=True):
            batch.encoded[row] = encode(output_TD, self._kept.form), output_TD
        return torch.stack([batch.encoded[row][0].decode() for row in rows]).to(output_BTD.device)

    def _keep(self, keys: Sequence[bytes], batch: _Batch, result: Tensor) -> None:
        if not self._even.get((0, *batch.shape[1:]), True):
            return
        for row in batch.missing:
            encoded, output = batch.encoded.get(row) or (encode(result[row], "exact"), None)
            if self._store.put(keys[row], encoded) and output is not None:
                self._error.add(output, encoded.decode())
        if self._store.problem:
            self._engine.notes["kept outputs end"] = f"no more outputs are kept: {self._store.problem}"

    def _price(self, length: int) -> float:
        """Return the FLOPs of the layers for one example; 0 while nothing was counted."""
        return 0.0 if self._cost is None else length * (self._cost[0] + length * self._cost[1])

    def _tell_uneven(self, shape: Shape) -> None:
        missing, examples, length = shape
        what = f"{examples - missing} of {examples} examples of {length} positions"
        self._engine.notes[f"kept outputs of {shape}"] = (
            f"outputs of frozen layers are computed for batches with {what} known: on this machine their bits depend "
            "on the other examples"
        )


class _Batch:
    """One batch on its way through the frozen layers."""

    def __init__(
        self, calls: LayerCalls, whole: Tensor | None, known: Mapping[int, Tensor], missing: Sequence[int]
    ) -> None:
        self.calls, self.whole, self.known, self.missing = calls, whole, known, missing
        self.encoded: dict[
            int, tuple[Encoded, Tensor]
        ] = {}  # of computed rows, with what was encoded, if it is rounded
        self.num_executed = 0  # examples that ran through the layers, each as often as it did
        self.is_whole = False  # whether all of them ran together, so that the result is the plain one

    @property
    def shape(self) -> Shape:
        return len(self.missing), self.calls.num_examples, self.calls.length


class _LayerOverride(ForwardOverride):
    """The ``forward`` of one frozen layer."""

    def __init__(self, module: nn.Module, number: int, extension: OutputExtension) -> None:
        self.module, self.number, self._extension = module, number, extension
        self.plain = partial(self.run_covered, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs) if self.is_removed else self._extension.run(self, args, kwargs)


class _StartHook(NotCopyable):
    """Hook before the model's forward."""

    def __init__(self, extension: OutputExtension) -> None:
        self._extension = extension

    def __call__(self, _module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        self._extension.start_forward(kwargs)


def make_outputs(policy: ParameterSelector, model: nn.Module, given: Given) -> OutputExtension | None:
    """Return what keeps outputs for a policy; None if it keeps none."""
    kept = policy.keeps_outputs
    return None if kept is None else OutputExtension(policy, kept, model, given)


def _find_frozen(policy: ParameterSelector, model: nn.Module, given: Given) -> tuple[list[str], list[nn.Module]]:
    """Return the names and modules of the layers below the lowest one that is trained."""
    name, numbers = type(policy).__name__, LayerNumbers(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} keeps outputs of one stack of layers, and this model has two")
    parameters, places = find_parameters(model)
    step = given.states.show(policy, given.first)
    trained = {id(parameter_of(*places[chosen])) for chosen in policy.at(step).select(parameters, step)}
    layers = list[nn.Module]()
    for layer in numbers.layers:
        if any(id(parameter) in trained for parameter in layer.parameters()):
            break
        layers.append(layer)
    if not layers:
        first = f"{numbers.names[0]} is trained" if numbers.layers else "this model has no layers"
        raise PolicyError(
            f"cache: keeps what the frozen lowest layers return, and {first}: freeze it, or leave cache out"
        )
    embeddings = model.get_input_embeddings() if isinstance(model, HasEmbeddings) else None
    if embeddings is not None and any(id(parameter) in trained for parameter in embeddings.parameters()):
        raise PolicyError(
            "cache: keeps what the frozen lowest layers return, and the embeddings before them are trained: freeze "
            "them (a tied head with them), or leave cache out"
        )
    return numbers.names[: len(layers)], layers


def _make_store(kept: KeptOutputs, folder: Path | None, name: str) -> OutputStore:
    if kept.place == "memory":
        return MemoryStore(kept.max_bytes)
    if folder is None:
        raise UsageError(
            f"{name} keeps outputs on disk: give attach(folder=...), the training's own, or cache='memory'"
        )
    return DiskStore(folder / FOLDER, kept.max_bytes)


def _check_output(output: object, name: str) -> Tensor:
    hidden = hidden_of(output)
    others = output[1:] if isinstance(output, tuple) else ()
    if not isinstance(hidden, Tensor) or any(other is not None for other in others):
        raise UnsupportedError(f"outputs of frozen layers cannot be kept: {name} returns more than its hidden states")
    return hidden


def _read_rng() -> tuple[Tensor, ...]:
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return (torch.get_rng_state(), *states)


def _differs(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other)
