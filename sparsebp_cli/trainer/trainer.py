"""``transformers.Trainer`` with policies: all that it does is the callback's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from transformers import Trainer

from sparsebp_cli.backward import Engine
from sparsebp_cli.composition import BackwardChoices, BackwardOptions
from sparsebp_cli.trainer.callback import PolicyCallback
from sparsebp_cli.trainer.choice import Chosen


class PolicyTrainer(Trainer):
    """A ``transformers.Trainer`` whose backward is decided by policies: every argument of its, and those below.

    While ``train()`` runs the engine is attached; afterwards, however it ended, the model is as it was. Evaluation is
    dense. Without an approximating policy the trained weights are those of ``Trainer``, bit for bit.

    Args:
        *args: As for ``Trainer``.
        policies: Each a policy, the name of one, or a mapping of ``name`` and its options; none is dense.
        backward: How the backward pass is executed, such as ``{"sites": "branches"}``. ``update="eager"`` and
            ``checkpointing="full"`` are refused: the trainer steps its optimizer itself, and checkpointing of whole
            layers is an option of ``TrainingArguments``.
        reference: As for :func:`sparsebp_cli.attach`.
        policy_seed: Of random decisions; None: ``args.seed``.
        log_flops_every: At the first optimizer step and then at every so many, the FLOPs of one micro-batch, dense
            and with the policies, are counted and logged, at least 1; the loss is computed twice more for that, on
            copies of the batch, and nothing else changes. None: never.
        **kwargs: As for ``Trainer``.

    Raises:
        UsageError: A policy, an option or a pattern is wrong.
        UnsupportedError: Something in the training arguments that is not built: DeepSpeed, FSDP, Liger, and others.
    """

    def __init__(
        self,
        *args: Any,
        policies: Sequence[Chosen] = (),
        backward: BackwardOptions | BackwardChoices | None = None,
        reference: nn.Module | Literal["batch"] | None = None,
        policy_seed: int | None = None,
        log_flops_every: int | None = 500,
        **kwargs: Any,
    ) -> None:
        callback = PolicyCallback(
            policies,
            backward=backward,
            reference=reference,
            seed=policy_seed,
            log_flops_every=log_flops_every,
        )
        super().__init__(*args, **kwargs)
        self.policy_callback: PolicyCallback = callback.join(self)

    @property
    def engine(self) -> Engine | None:
        """The engine of the ``train()`` under way, or of the last one; None before the first."""
        return self.policy_callback.engine
