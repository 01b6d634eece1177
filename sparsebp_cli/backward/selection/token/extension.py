"""Token selection at work in one model: its forward asks which positions are trained, and computes what they need.

With labels, in training, with gradients, the model's forward returns the loss of the trained positions and no logits.
A loss of the user's own is computed without labels: then :meth:`TokenExtension.give` tells what the script keeps from
the model, and the logits of all positions come back, zeros where a position is not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.extension import refuse_unasked
from sparsebp_cli.backward.decoder.decoder import Decoder, argument_names, find_decoder, refuse_prompt
from sparsebp_cli.backward.observe.claim import DensePass, PassEstimate
from sparsebp_cli.backward.patch.forward import ForwardOverride, call_module, check_free, replace_forwards
from sparsebp_cli.backward.selection.score.token_scores import TokenChooser
from sparsebp_cli.backward.selection.token.flop_claim import Sizes, claim
from sparsebp_cli.backward.selection.token.layer_run import draws, narrows, no_graph
from sparsebp_cli.backward.selection.token.layers import Stack
from sparsebp_cli.backward.selection.token.loss import (
    check_loss,
    masked_labels,
    row_loss,
    scale,
    spread_logits,
    with_changes,
)
from sparsebp_cli.backward.selection.token.reference import detached
from sparsebp_cli.backward.selection.token.row_plan import PositionMask, RowPlan, make_plan, read_marks
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Policy, ScoredTokenSelector, Step, TokenSelector
from sparsebp_cli.policy.token import TokenChoice

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView


class TokenChoiceSource(Protocol):
    """Chooses positions of one batch."""

    def choose(self, arguments: Mapping[str, Any], plain_forward: Callable[..., Any], step: Step) -> TokenChoice:
        """Choose positions. Called in a forward in training, with gradients enabled, before anything is computed.

        Args:
            arguments: The forward's arguments by name, as the caller gave them: ``labels`` is among them, and
                ``input_ids`` or ``inputs_embeds``. Columns that the model's own forward does not know are among them
                too; whoever carries the choice out removes ``columns``. Nothing may be changed.
            plain_forward: The model's own forward, as it would be without the policy; for scores. It follows the
                gradient and training mode that it is called in.
            step: When.

        Returns:
            Two boolean tensors of the labels' shape.
        """

    def install(self, engine: EngineView) -> None:
        """Be told whose clock and counters these are, before the first choice."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of arguments that only the chooser reads."""


_NO_LABELS = (
    "{} chooses positions by the labels, and the model was called in training without any: pass labels, or give them "
    "by engine.columns(labels=...) where your own loss takes them out of the batch, or use engine.disabled()"
)
_UNKNOWN = ("past_key_values", "output_hidden_states", "output_attentions", "logits_to_keep", "shift_labels")


@final
class TokenExtension:
    """See :class:`~sparsebp_cli.backward.core.extension.EngineExtension`.

    Args:
        policy: Its ``mode`` says how choices are carried out.
        decoder: The model.
        chooser: Asks the policy.
        prefix: What stands before the decoder's module names in the attached model.

    Raises:
        UnsupportedError: The model is attached, or has a forward of its own.
    """

    def __init__(self, policy: TokenSelector, decoder: Decoder, chooser: TokenChoiceSource, prefix: str = "") -> None:
        self.policy, self.decoder, self.chooser = policy, decoder, chooser
        self._prefix, self._last = prefix, cast("RowPlan | None", None)
        self.given: dict[str, Tensor] = {}
        self.was_asked = False
        check_free("the model", decoder.model)
        for layer in decoder.layers:
            check_free(layer.name, layer.module)
        check_loss(decoder.model)

    def install(self, engine: EngineView) -> None:
        self.chooser.install(engine)
        self._forward = DecoderOverride(self, engine)
        self.decoder.model.forward = self._forward

    def remove(self) -> None:
        self._forward.is_removed = True
        if self.decoder.model.__dict__.get("forward") is self._forward:  # else somebody has wrapped it
            del self.decoder.model.__dict__["forward"]

    def enable(self, enabled: bool) -> None:
        """Do nothing: the forward asks the engine."""

    def start_step(self, step: Step) -> None:
        """Do nothing: choices are made in the forward."""

    def give(self, **columns: Tensor) -> None:
        """Give columns of the coming batch that the script keeps from the model, such as labels and a mask of its own.

        Args:
            **columns: By name; they count until the next call.
        """
        self.given = columns

    def check_asked(self) -> None:
        if not self.was_asked:
            refuse_unasked(self.policy, self.decoder.model)

    def remember(self, plan: RowPlan | None, length: int) -> None:
        """Note what was chosen last, for :meth:`claim`.

        Args:
            plan: None: everything is computed.
            length: Positions of the batch.
        """
        self._last, self._length = plan, length

    def claim(self, dense: DensePass) -> PassEstimate:  # noqa: ARG002 - shares say it
        """Return what the choice of the last forward, of the same batch, leaves of a dense pass."""
        if self._last is None:
            return PassEstimate()
        return claim(
            self.decoder,
            self._prefix,
            Sizes.chosen(self._last, self._length),
            narrows=narrows(self.decoder, self._last),
            remembers=not any(draws(layer.module) for layer in self.decoder.layers),
        )


class DecoderOverride(ForwardOverride):
    """The ``forward`` of a causal language model.

    Args:
        part: Says what is chosen, and how.
        engine: Whether it is in force, and the step.
    """

    def __init__(self, part: TokenExtension, engine: EngineView) -> None:
        self.part, self.engine, self.is_removed = part, engine, False
        self._model = part.decoder.model
        # The number of rows differs from step to step; what is compiled inside of the layers stays so.
        self._run: Callable[..., Any] = cast("Any", torch.compiler).disable(self._select)
        self._names = argument_names(self._model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if args and args[0] is self._model:  # accelerate binds what it once wrapped as a method
            args = args[1:]
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        columns = self.part.chooser.columns
        own = {name: value for name, value in arguments.items() if name not in columns}
        if self.is_removed or not (self.engine.enabled and self._model.training and torch.is_grad_enabled()):
            return call_module(self._model, **own)
        return self._run(arguments, own)

    def _select(self, arguments: dict[str, Any], own: dict[str, Any]) -> Any:
        self.part.was_asked = True
        known = self.part.given | {name: value for name, value in arguments.items() if value is not None}
        labels, given = known.get("labels"), own.get("labels") is not None
        if labels is None:
            raise UsageError(_NO_LABELS.format(type(self.part.policy).__name__))
        self._check(own, labels)
        choice = self.part.chooser.choose(known, self._plain, self.engine.now())
        marks = read_marks(choice, labels, own.get("attention_mask"), self.part.decoder.implementation)
        return_dict = own.pop("return_dict", None)
        own |= {"labels": None, "return_dict": True}
        num_items = own.pop("num_items_in_batch", None)
        if num_items is not None:
            num_items = self.part.given.get("num_items_in_batch", num_items)
        plan = None if marks.is_whole else make_plan(marks, labels, self.part.policy.mode, self.part.decoder.pair_cost)
        self.part.remember(plan, labels.shape[1])
        if plan is None or self.engine.reference:
            output = self._run_all(own, labels if given else None, num_items, marks)
        else:
            output = self._run_rows(own, plan, num_items, marks, with_loss=given)
        # The cache is of rows, or of all positions: of no use to anybody after training on them.
        output = with_changes(output, past_key_values=None)
        return output.to_tuple() if return_dict is False else output

    def _check(self, own: Mapping[str, Any], labels: Tensor) -> None:
        for name in _UNKNOWN:
            value = own.get(name)
            if isinstance(value, Tensor) or value:
                raise UnsupportedError(f"token selection does not know what to do with {name} in training")
        first = next(own[name] for name in ("input_ids", "inputs_embeds") if own.get(name) is not None)
        if labels.shape != first.shape[:2]:
            shapes = f"{tuple(first.shape[:2])}, got {tuple(labels.shape)}"
            raise UsageError(f"labels must have the inputs' examples and positions {shapes}")

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return call_module(self._model, *args, **kwargs)
        with no_graph(next(self._model.parameters()).device):
            return call_module(self._model, *args, **kwargs)

    def _run_all(self, own: dict[str, Any], labels: Tensor | None, num_items: Any, marks: PositionMask) -> Any:
        """Compute everything: the reference, and what is done where nothing can be left out."""
        if labels is not None:
            own["labels"] = labels if marks.is_whole else masked_labels(labels, marks)
            if num_items is not None:
                own["num_items_in_batch"] = scale(num_items, marks)
        if marks.is_whole or self.part.policy.mode == "exact":
            return call_module(self._model, **own)
        with detached(self.part.decoder, marks.carries.to(next(self._model.parameters()).device)):
            return call_module(self._model, **own)

    def _run_rows(
        self, own: dict[str, Any], plan: RowPlan, num_items: Any, marks: PositionMask, *, with_loss: bool
    ) -> Any:
        num_rows = marks.real.shape[0] * marks.real.shape[1]
        stack, head = Stack(self.part.decoder, plan, (marks.real.shape[0], marks.real.shape[1])), self.part.decoder.head
        cut = partial(_run_head, head, head.__dict__.get("forward"), len(plan.label_N))
        with stack.installed(), replace_forwards([(head, cut)]), self.engine.short_forward(num_rows=num_rows):
            output = call_module(self._model, **own)
        return self._finish(output, plan, num_items, marks, with_loss=with_loss)

    def _finish(self, output: Any, plan: RowPlan, num_items: Any, marks: PositionMask, *, with_loss: bool) -> Any:
        logits = output.logits
        if with_loss:
            # Of nothing, the targets of a whole step may be nothing, and a number over that is none.
            items = scale(num_items, marks) if plan.num_trained else None
            loss = row_loss(self._model, logits, plan.label_N, items)
            return with_changes(output, loss=loss if plan.num_trained else loss * 0.0, logits=None)
        if plan.num_trained:
            return with_changes(output, logits=spread_logits(logits[0], marks))
        return with_changes(
            output, logits=logits.new_zeros(*marks.trained.shape, logits.shape[-1]) + 0.0 * logits.sum()
        )


def _run_head(head: nn.Module, covered: Any, num_rows: int, hidden: Tensor) -> Tensor:
    """Run the head for the trained rows; what only fills up a shape stands behind them."""
    rows_1ND = hidden.flatten(0, -2)[None, :num_rows]
    return cast("Tensor", call_module(head, rows_1ND) if covered is None else covered(rows_1ND))


def make_extensions(
    policies: Iterable[Policy], model: nn.Module, reference: nn.Module | str | None
) -> list[TokenExtension]:
    """Return the extension of the token selector among some policies.

    Args:
        policies: Of any kind.
        model: Without DDP.
        reference: A model whose loss is compared with; any other value: each batch brings that loss.

    Returns:
        The extension, not yet installed; none without a token selector.

    Raises:
        UnsupportedError: The model's architecture is not known, or it is attached.
    """
    policy = next((policy for policy in policies if isinstance(policy, TokenSelector)), None)
    if policy is None:
        return []
    decoder = find_decoder(model)
    name = next(name for name, module in model.named_modules() if module is decoder.model)
    if isinstance(policy, ScoredTokenSelector) and policy.mode == "detach" and policy.carry == "trained":
        refuse_prompt(model, type(policy).__name__)
    scores = reference if isinstance(reference, nn.Module) else None
    return [TokenExtension(policy, decoder, TokenChooser(policy, decoder.model, scores), f"{name}." if name else "")]
