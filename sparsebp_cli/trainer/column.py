"""What a user's own loss keeps from the model, handed to the policy that chooses tokens by it.

``compute_loss`` takes a mask, and often the labels too, out of the batch before it calls the model. The policy is asked
inside the model's forward: so what it reads is handed to it before ``compute_loss`` is called, and that stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsebp_cli.backward import Engine
from sparsebp_cli.policy import Policy, TokenSelector


def give_columns(engine: Engine, policies: Sequence[Policy], inputs: Mapping[str, Any]) -> None:
    """Hand the columns of a batch that policies read to the engine, which asks them.

    Args:
        engine: Attached.
        policies: That it carries out.
        inputs: The batch, before anything is taken out of it.
    """
    policy = next((policy for policy in policies if isinstance(policy, TokenSelector)), None)
    if policy is None:
        return
    names = policy.reads | ({"labels"} if chooses_by_data(policy) else set())
    given = {name: inputs[name] for name in names if isinstance(inputs.get(name), Tensor)}
    engine.columns(**given)


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
