"""Calls a token selector with the scores that it needs; implements
:class:`~sparsebp_cli.backward.kind.token.extension.TokenExtension`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.backward.kind.score.cost import ScoringCost
from sparsebp_cli.backward.kind.score.scorer import HasLogits, Scorer, next_tokens, real_positions
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import ReadTokens, Score, Step, TokenChoice, Tokens, TokenSelector, returned
from sparsebp_cli.policy.reference import REFERENCE_COLUMN

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.policy_state import PolicyStates
    from sparsebp_cli.backward.decoder.decoder import Decoder

OWN_SCORES: frozenset[Score] = frozenset(("loss", "entropy", "gradient_norm"))


class TokenChooser:
    """Builds a selector's input from the model's arguments, and calls the selector.

    ``decoder`` is the model without a DDP wrapper. ``reference`` computes ``reference_loss``; None: a column of the
    batch has it. Raises :class:`UnsupportedError` if a model cannot be scored, or the reference has another vocabulary.
    """

    def __init__(
        self,
        policy: TokenSelector,
        decoder: Decoder,
        states: PolicyStates,
        reference: nn.Module | None = None,
    ) -> None:
        what = f"{type(policy).__name__}, which scores tokens,"
        self._policy, self._has_schedule, self._states = policy, bool(policy.schedules), states
        self._count: Callable[[Chosen], None] = _forget
        self._scorer = Scorer(decoder.model, what) if policy.needs & OWN_SCORES else None
        self._needs_reference = "reference_loss" in policy.needs
        self._reads = policy.reads
        self._reference = None
        if self._needs_reference and reference is not None:
            self._reference = Scorer(reference, f"{what} by a reference")
            check_vocabulary(decoder.model, self._reference)
        by_batch = self._needs_reference and self._reference is None
        self.columns: frozenset[str] = self._reads | (frozenset({REFERENCE_COLUMN}) if by_batch else frozenset())

    def install(self, engine: EngineView) -> None:
        """Count choices with this engine from now on."""
        self._count = engine.add_chosen

    def choose(
        self,
        arguments: Mapping[str, object],
        plain_forward: Callable[..., HasLogits],
        step: Step,
    ) -> TokenChoice:
        labels_BT = _tensor(arguments, "labels")
        self._check(arguments, labels_BT)
        own = {name: value for name, value in arguments.items() if name not in self.columns}
        next_BT = next_tokens(labels_BT)
        target_BT = next_BT != -100
        real_BT = real_positions(arguments, target_BT)
        scores: dict[Score, Tensor] = {}
        cost = ScoringCost(target_BT.device)
        if self._scorer is not None or self._reference is not None:
            with cost:
                if self._scorer is not None:
                    scores |= self._scorer.score(own, next_BT, plain_forward, self._policy.needs & OWN_SCORES)
                if self._reference is not None:
                    scores["reference_loss"] = score_reference(self._reference, own, next_BT)
        if self._needs_reference and self._reference is None:
            scores["reference_loss"] = _tensor(arguments, REFERENCE_COLUMN).float().masked_fill(~target_BT, 0.0)
        columns = {name: _tensor(arguments, name) for name in self._reads}
        ids = arguments.get("input_ids")
        tokens = Tokens(ids if isinstance(ids, Tensor) else None, target_BT, real_BT, scores, columns)
        policy = self._policy.at(step) if self._has_schedule else self._policy
        if self._states.watches(self._policy, ReadTokens):
            seen = ReadTokens(self._states.next_forward(self._policy), tokens)
            self._states.see(self._policy, seen, step)
        choice = policy.choose(tokens, self._states.show(self._policy, step))
        returned.require_token_choice(f"{type(policy).__name__}.choose", choice, target_BT)
        counts = (target_BT.sum(), choice.trained_BT.sum(), real_BT.sum(), choice.carries_BT.sum())
        self._count(Chosen(*counts, scoring_seconds=cost.seconds, scoring_flops=cost.flops))
        return choice

    def _check(self, arguments: Mapping[str, object], like_BT: Tensor) -> None:
        for name in sorted(self.columns):
            if name not in arguments:
                known = sorted(arguments)
                raise UsageError(
                    f"{type(self._policy).__name__} reads the column {name!r}, but the batch has only "
                    f"{', '.join(known)}{did_you_mean(name, known)}"
                )
            shape, wanted = tuple(_tensor(arguments, name).shape), tuple(like_BT.shape)
            if shape != wanted:
                raise UsageError(f"column {name!r} must have the labels' shape {wanted}, got {shape}")


def _tensor(arguments: Mapping[str, object], name: str) -> Tensor:
    value = arguments[name]
    assert isinstance(value, Tensor)
    return value


def _forget(_: Chosen) -> None:
    """Ignore a count."""


def score_reference(scorer: Scorer, arguments: Mapping[str, object], next_BT: Tensor) -> Tensor:
    """Return a reference model's loss of each target of a batch, (B, T), 0 elsewhere."""
    if arguments.get("input_ids") is None:
        raise UsageError("a reference model needs input_ids, but the batch has none")
    names = ("input_ids", "attention_mask", "position_ids")
    known = {name: arguments[name] for name in names if arguments.get(name) is not None}
    return scorer.score(known, next_BT, scorer.model, {"loss"})["loss"]


def check_vocabulary(model: nn.Module, reference: Scorer) -> None:
    """Raise :class:`UnsupportedError` unless a reference has the model's number of tokens."""
    own = cast("Any", model).get_input_embeddings().weight.shape[0]
    if reference.num_tokens != own:
        raise UnsupportedError(
            f"the reference's vocabulary must have {own} tokens, like the trained model's, got {reference.num_tokens}"
        )
