"""What a user's own loss keeps from the model, handed to the policy that chooses tokens by it.

``compute_loss`` takes a mask, and often the labels too, out of the batch before it calls the model. The policy is asked
inside the model's forward: so what it reads is handed to it before ``compute_loss`` is called, and that stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsebp_cli.backward import Engine
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Policy, TokenSelector

IGNORED = -100  # a label that trains nothing, as in transformers


def give_columns(
    engine: Engine,
    policies: Sequence[Policy],
    inputs: Mapping[str, Any],
    num_candidates: Tensor | int | None = None,
    *,
    removes: bool = False,
) -> None:
    """Hand the columns of a batch that policies read to the engine, which asks them.

    Args:
        engine: Attached.
        policies: That it carries out.
        inputs: The batch, before anything is taken out of it.
        num_candidates: Of the whole step, counted as :func:`only_candidates` leaves them; None: all targets are.
        removes: Whether the trainer keeps columns that the model does not know out of batches.

    Raises:
        UsageError: A column that a policy reads was removed.
    """
    policy = _selector(policies)
    if policy is None:
        return
    missing = sorted(policy.reads - set(inputs))
    if missing and removes:
        raise UsageError(
            f"{type(policy).__name__} reads the column {missing[0]!r}, and the batch has none: TrainingArguments("
            "remove_unused_columns=False) keeps columns that the model does not know"
        )
    names = policy.reads | ({"labels"} if chooses_by_data(policy) else set())
    given = {name: inputs[name] for name in names if isinstance(inputs.get(name), Tensor)}
    found = only_candidates(policies, [inputs])
    if num_candidates is not None and found is not None:
        # The engine multiplies with the share of this batch's targets that is trained: leave that of candidates.
        targets, own = (batch["labels"][:, 1:].ne(IGNORED).sum() for batch in (inputs, found[0]))
        given["num_items_in_batch"] = num_candidates * (targets / own.clamp(min=1))
    engine.columns(**given)


def only_candidates(policies: Sequence[Policy], batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return batches whose labels are those of the tokens alone that the data says may be trained.

    Args:
        policies: One of them may read the column that says so.
        batches: As the data loader makes them.

    Returns:
        Copies; None where all targets may be trained, or a batch does not tell.
    """
    policy = _selector(policies)
    name = None if policy is None else policy.candidate_column
    if name is None or not all(isinstance(batch.get(key), Tensor) for batch in batches for key in (name, "labels")):
        return None
    return [{**batch, "labels": batch["labels"].masked_fill(batch[name] == 0, IGNORED)} for batch in batches]


def _selector(policies: Sequence[Policy]) -> TokenSelector | None:
    return next((policy for policy in policies if isinstance(policy, TokenSelector)), None)


def chooses_by_data(policy: TokenSelector) -> bool:
    """Whether what is trained is what the data marks, so that a loss of the user's own knows it too.

    Where the policy itself chooses, only the model's loss, computed where the choice is made, counts the right tokens.

    Args:
        policy: Any.

    Returns:
        Whether it is.
    """
    shares = (policy.budget, getattr(policy, "keep", None), getattr(policy, "band", None))  # a plugin may have neither
    return not policy.needs and all(share in (None, 1.0) for share in shares)
