"""Token selection in one model: its forward lets the policy choose positions, and computes the rows that they need.

In training with gradients and labels, the model's forward returns the loss of the trained positions, and its logits
cannot be read. A script with its own loss calls the model without labels. :meth:`TokenExtension.set_columns` then
supplies the labels, and the forward returns logits of all positions, with zeros at positions that are not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension, refuse_uncalled
from sparsebp_cli.backward.core.loss_weight import calls_loss_function, forward_weights, has_causal_loss
from sparsebp_cli.backward.decoder.decoder import Decoder, argument_names, find_decoder, refuse_prompt
from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES
from sparsebp_cli.backward.kind.model_output import with_changes
from sparsebp_cli.backward.kind.score.token_scores import TokenChooser
from sparsebp_cli.backward.kind.token.compiled import GraphTokens, list_rows
from sparsebp_cli.backward.kind.token.flop_claim import Sizes, claim
from sparsebp_cli.backward.kind.token.layers import LayerStack, has_dropout, narrows, no_graph
from sparsebp_cli.backward.kind.token.loss import (
    NumItems,
    check_loss,
    check_own_loss,
    guard_unlabelled,
    masked_labels,
    row_loss,
    scale,
    spread_logits,
)
from sparsebp_cli.backward.kind.token.reference import detached
from sparsebp_cli.backward.kind.token.row_plan import PositionMask, RowPlan, make_plan, read_choice
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.observe.internals import find_hook
from sparsebp_cli.backward.patch.deferred import defer_logits
from sparsebp_cli.backward.patch.forward import (
    ForwardOverride,
    ForwardPatches,
    ModulePlaces,
    check_free,
    uncompiled,
)
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import ScoredTokenSelector, TokenSelector

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given
    from sparsebp_cli.backward.kind.model_output import ModelOutput


@runtime_checkable
class PacksRows(Protocol):
    """An inner forward that skips the rows that the labels do not need."""

    def reading(self, labels_BT: Tensor) -> AbstractContextManager[None]:
        """Return a context in which a forward without labels computes the rows that these labels need."""


_NO_LABELS = (
    "{} chooses positions by the labels, but this training forward got no labels: pass labels to the model; "
    "or, if you compute the loss yourself, to engine.columns(labels=...); or use engine.disabled()"
)
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
_UNKNOWN = (*CACHE_NAMES, *_OUTPUTS, "logits_to_keep", "shift_labels")


@final
class TokenExtension(EngineExtension):
    """A token selector in one model.

    ``prefix`` precedes the decoder's module names in the attached model. ``packs``: a packer executes the choice.
    Raises :class:`UnsupportedError` if a forward is overridden already.
    """

    policy: TokenSelector
    decoder: Decoder
    chooser: TokenChooser
    was_called: bool
    places: ModulePlaces

    def __init__(
        self,
        policy: TokenSelector,
        decoder: Decoder,
        chooser: TokenChooser,
        prefix: str = "",
        *,
        packs: bool = False,
    ) -> None:
        self.policy, self.decoder, self.chooser = policy, decoder, chooser
        self._prefix = prefix
        self._last: RowPlan | None = None
        self._engine: EngineView | None = None
        self._patches = ForwardPatches()
        self.given: dict[str, Tensor] = {}
        self.was_called = False
        if not packs:  # a packer checks the forward that it covers itself, and supports trl's
            check_free("the model", decoder.model)
        for layer in decoder.layers:
            check_free(layer.name, layer.module)
        check_loss(decoder.model)

    def install(self, engine: EngineView) -> None:
        self.chooser.install(engine)
        self._engine, self.places = engine, ModulePlaces(self.decoder.model)
        self.graph = GraphTokens(self.decoder, self, self._patches)
        self._patches.install(self.decoder.model, DecoderOverride(self, engine))

    def remove(self) -> None:
        self._patches.remove()

    @override
    def set_columns(self, **columns: Tensor) -> None:
        """Set columns of the next batch that the script does not pass to the model, until the next call."""
        self.given = columns

    @override
    def check_called(self) -> None:
        if not self.was_called:
            refuse_uncalled(self.policy, self.decoder.model)

    def choose_rows(self, known: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Choose the positions of a batch while a compiled graph runs.

        Returns the carried positions (B, K) and which of them are not padding, the same for dropped positions (B, M),
        the labels of the carried positions, the fraction of the targets that is trained, and 0 if none is, else 1.
        """
        self.was_called = True
        labels, mask, decoder, engine = known["labels"], known.get("attention_mask"), self.decoder, self._engine
        assert engine is not None
        choice = self.chooser.choose(known, _no_forward, engine.now())
        marks = read_choice(choice, labels, mask, spreads=decoder.spreads_masked)
        self.remember(make_plan(marks, labels, self.policy.mode, decoder.pair_cost), labels.shape[1])
        engine.dense_rows = labels.numel()
        with engine.short_forward(num_rows=labels.numel()):  # records that positions are skipped
            return list_rows(marks, labels)

    def fits_graph(self, known: Mapping[str, object]) -> bool:
        """Return whether a forward with these arguments can be one graph."""
        if self.policy.mode != "detach" or self.policy.needs or self.given:
            return False
        model = self.decoder.model
        if not (self.graph.fits and calls_loss_function(model)) or forward_weights(model) is not None:
            return False
        if not has_causal_loss(self.decoder.model):  # the loss was replaced; the eager forward raises an error
            return False
        if self._engine is None or self._engine.batch_sizes is not None:  # a gradient selector is attached, too
            return False
        labels, mask = known.get("labels"), known.get("attention_mask")
        is_plain = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
        return isinstance(labels, Tensor) and is_plain and known.get("return_dict") is not False

    def remember(self, plan: RowPlan | None, length: int) -> None:
        """Store the plan of the last forward for :meth:`claim`; None if it computed all positions."""
        self._last, self._length = plan, length

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass, from the choice of the last forward on the same batch."""
        if self._last is None:
            return PassEstimate()
        return claim(
            self.decoder,
            self._prefix,
            Sizes.chosen(self._last, self._length),
            narrows=narrows(self.decoder, self._last),
            remembers=not any(has_dropout(layer.module) for layer in self.decoder.layers),
        )


class DecoderOverride(ForwardOverride):
    """The ``forward`` of a causal language model."""

    extension: TokenExtension
    engine: EngineView

    def __init__(self, extension: TokenExtension, engine: EngineView) -> None:
        self.extension, self.engine = extension, engine
        self._model = extension.decoder.model
        # Do not compile, since the number of rows differs from step to step. Compiled layers stay compiled.
        self._run = uncompiled(self._select)
        self._names = argument_names(self._model)
        self._knows_loss = calls_loss_function(self._model)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model."""
        if args and args[0] is self._model:  # accelerate's wrapper calls the wrapped forward as a method
            args = args[1:]
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        columns = self.extension.chooser.columns
        own = {name: value for name, value in arguments.items() if name not in columns}
        if self.is_removed or not (self.engine.enabled and self._model.training and torch.is_grad_enabled()):
            return self.run_covered(self._model, **own)
        extension = self.extension
        if torch.compiler.is_compiling() and not self.engine.reference and extension.fits_graph(arguments):
            _refuse_unknown(own)
            return extension.graph.run(arguments, own)
        return self._run(arguments, own)

    def _check_modules(self) -> None:
        """Refuse a replaced module, and a foreign hook that would see only the chosen positions."""
        self.extension.places.check()
        if hook := find_hook(self._model, inside=True):
            raise UnsupportedError(f"{hook}: remove the hook, or train without token selection")

    def _select(self, arguments: dict[str, object], own: dict[str, object]) -> object:
        self.extension.was_called = True
        self._check_modules()
        known = {**self.extension.given, **{name: value for name, value in arguments.items() if value is not None}}
        labels, given = known.get("labels"), own.get("labels") is not None
        if labels is None:
            raise UsageError(_NO_LABELS.format(type(self.extension.policy).__name__))
        assert isinstance(labels, Tensor)
        self._check(own, labels)
        decoder, mask = self.extension.decoder, own.get("attention_mask")
        choice = self.extension.chooser.choose(known, self._plain, self.engine.now())
        implementation = decoder.implementation
        marks = read_choice(choice, labels, mask if isinstance(mask, Tensor) else None, spreads=decoder.spreads_masked)
        return_dict = own.pop("return_dict", None)
        own |= {"labels": None, "return_dict": True}
        num_items = own.pop("num_items_in_batch", None)
        if num_items is not None:
            num_items = self.extension.given.get("num_items_in_batch", num_items)
        assert num_items is None or isinstance(num_items, Tensor | int | float)
        if isinstance(self.covered, PacksRows):
            self.extension.remember(None, labels.shape[1])
            output = self._run_packed(self.covered, own, labels, num_items, marks, given=given)
            has_logits = True
        else:
            output = self._run_chosen(own, labels, num_items, marks, implementation, given=given)
            has_logits = output.logits is not None
        if return_dict is False:
            return output.to_tuple()
        return output if has_logits else defer_logits(output, _refuse_logits)

    def _run_chosen(
        self,
        own: dict[str, object],
        labels: Tensor,
        num_items: NumItems,
        marks: PositionMask,
        implementation: str,
        *,
        given: bool,
    ) -> ModelOutput:
        """Compute the rows that the chosen labels need, or all rows if none can be skipped."""
        policy, plan = self.extension.policy, None if marks.is_whole else self._plan(marks, labels)
        self.extension.remember(plan, labels.shape[1])
        changes: dict[str, Tensor | None] = {}
        if plan is None or self.engine.reference:
            all_labels = None if not given else labels if plan is None else masked_labels(labels, marks)
            output = self._run_all(own, all_labels, num_items, marks, is_whole=plan is None)
        else:
            output = self._run_rows(own, plan, marks, implementation)
            changes = self._finish(output.logits, plan, num_items, marks, with_loss=given)
            if policy.mode == "exact" and (logits := changes.get("logits")) is not None:
                changes["logits"] = guard_unlabelled(logits, labels, marks)
        # The cache may lack positions, so remove it from the output.
        return with_changes(output, **dict.fromkeys(CACHE_NAMES), **changes)

    def _check(self, own: Mapping[str, object], labels: Tensor) -> None:
        _refuse_unknown(own)
        given = (own.get(name) for name in ("input_ids", "inputs_embeds"))
        first = next(value for value in given if isinstance(value, Tensor))
        if labels.shape != first.shape[:2]:
            shapes = f"{tuple(first.shape[:2])}, got {tuple(labels.shape)}"
            raise UsageError(f"labels must have the inputs' shape (examples, positions), {shapes}")
        if own.get("labels") is not None and not self._knows_loss:
            check_own_loss(self._model, self.extension.decoder.head, own)
            self._knows_loss = True

    def _plan(self, marks: PositionMask, labels: Tensor) -> RowPlan:
        decoder, mode = self.extension.decoder, self.extension.policy.mode
        return make_plan(marks, labels, mode, decoder.pair_cost, joins_unequal=decoder.is_one_bias)

    def _plain(self, *args: object, **kwargs: object) -> ModelOutput:
        model = self._model
        with nullcontext() if torch.is_grad_enabled() else no_graph(next(model.parameters()).device):
            output: ModelOutput = type(model).forward(model, *args, **kwargs)
        return output

    def _run_all(
        self, own: dict[str, object], labels: Tensor | None, num_items: NumItems, marks: PositionMask, *, is_whole: bool
    ) -> ModelOutput:
        """Compute all positions: the reference, and the fallback if nothing can be skipped."""
        if labels is not None:
            own["labels"] = labels
            if num_items is not None:
                own["num_items_in_batch"] = scale(num_items, marks)
        return self._call(own) if is_whole else self._run_cut(own, marks)

    def _run_packed(
        self,
        packed: PacksRows,
        own: dict[str, object],
        labels: Tensor,
        num_items: NumItems,
        marks: PositionMask,
        *,
        given: bool,
    ) -> ModelOutput:
        """Let the packed forward compute the rows that the chosen labels need."""
        chosen = masked_labels(labels, marks)
        if given:
            # The mean over no label is NaN, but the loss of a batch without chosen tokens must be 0.
            items = scale(num_items, marks) if marks.trained.any() else 1
            return self._call(own | {"labels": chosen} | ({} if items is None else {"num_items_in_batch": items}))
        with packed.reading(chosen):
            output = self._call(own)
        trained_BT = marks.trained.to(output.logits.device)
        logits = output.logits.masked_fill(~trained_BT[..., None], 0.0)
        return with_changes(output, logits=guard_unlabelled(logits, labels, marks))

    def _run_cut(self, own: dict[str, object], marks: PositionMask) -> ModelOutput:
        """Compute all positions, and detach positions that carry no gradient."""
        if self.extension.policy.mode == "exact":
            return self._call(own)
        with detached(self.extension.decoder, marks.carries.to(next(self._model.parameters()).device)):
            return self._call(own)

    def _run_rows(self, own: dict[str, object], plan: RowPlan, marks: PositionMask, implementation: str) -> ModelOutput:
        num_examples, length = marks.real.shape
        decoder = self.extension.decoder
        covered: Callable[[Tensor], Tensor] | None = decoder.head.__dict__.get("forward")
        cut = partial(_run_head, decoder.head, covered, len(plan.label_N))
        stack = LayerStack(decoder, implementation, plan, (num_examples, length))
        with stack.installed((decoder.head, cut)), self.engine.short_forward(num_rows=num_examples * length):
            return self._call(own)

    def _call(self, arguments: dict[str, object]) -> ModelOutput:
        output: ModelOutput = self.run_covered(self._model, **arguments)
        return output

    def _finish(
        self, logits: Tensor, plan: RowPlan, num_items: NumItems, marks: PositionMask, *, with_loss: bool
    ) -> dict[str, Tensor | None]:
        """Return the changed fields of the output: a loss without logits, or logits of all positions."""
        if with_loss:
            return {"loss": row_loss(self._model, logits, plan, num_items, marks), "logits": None}
        if plan.num_trained:
            return {"logits": spread_logits(logits[0], marks)}
        # Zeros that depend on the computed placeholder row, so that the user's loss has a graph.
        return {"logits": logits.new_zeros(*marks.trained.shape, logits.shape[-1]) + 0.0 * logits.sum()}


def _refuse_logits() -> NoReturn:
    raise UnsupportedError(
        "token selection returns no logits if the forward computes the loss: read logits in evaluation, or pass the "
        "labels to engine.columns instead of the forward"
    )


def _no_forward(*_: object, **__: object) -> NoReturn:
    raise AssertionError("policies that read scores are not in graphs")


def _refuse_unknown(own: Mapping[str, object]) -> None:
    for name in _UNKNOWN:
        value = own.get(name)
        if isinstance(value, Tensor) or value:
            raise UnsupportedError(f"token selection does not support {name} in training: leave it out of the batch")


def _run_head(head: nn.Module, covered: Callable[[Tensor], Tensor] | None, num_rows: int, hidden: Tensor) -> Tensor:
    """Run the head for the trained rows, which precede padding rows."""
    rows_1ND = hidden.flatten(0, -2)[None, :num_rows]
    logits: Tensor = type(head).forward(head, rows_1ND) if covered is None else covered(rows_1ND)
    return logits


def make_extension(policy: TokenSelector, model: nn.Module, given: Given) -> TokenExtension | None:
    """Return the extension for a token selector that skips rows itself; None if a packer skips them.

    Raise :class:`UnsupportedError` if the model's architecture is unknown, or it is attached.
    """
    return None if given.packs else _make(policy, model, given)


def make_chooser(policy: TokenSelector, model: nn.Module, given: Given) -> TokenExtension | None:
    """Return the extension for a token selector whose choice a packer executes; it wraps the packer's forward."""
    return _make(policy, model, given) if given.packs else None


def _make(policy: TokenSelector, model: nn.Module, given: Given) -> TokenExtension:
    decoder = find_decoder(model)
    name = next(name for name, module in model.named_modules() if module is decoder.model)
    if isinstance(policy, ScoredTokenSelector) and policy.mode != "exact":
        refuse_prompt(model, type(policy).__name__, policy.mode)
    scores = given.reference if isinstance(given.reference, nn.Module) else None
    chooser = TokenChooser(policy, decoder, given.states, scores)
    return TokenExtension(policy, decoder, chooser, f"{name}." if name else "", packs=given.packs)
