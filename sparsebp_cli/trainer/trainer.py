"""``transformers.Trainer`` with policies: a thin subclass around :class:`PolicyCallback`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from transformers import Trainer

from sparsebp_cli.backward import Engine
from sparsebp_cli.composition import BackwardChoices, BackwardOptions
from sparsebp_cli.errors import UsageError
from sparsebp_cli.trainer.callback import PolicyCallback, PolicyLike


class PolicyTrainer(Trainer):
    """A ``transformers.Trainer`` whose backward follows policies. It takes the arguments of ``Trainer`` and these.

    The engine is attached while ``train()`` runs; afterwards, however it ended, the model is as it was. Evaluation is
    dense. Without an approximating policy the trained weights are those of ``Trainer``, bit for bit.

    Args:
        *args: As for ``Trainer``.
        policies: Each a policy, the name of one, or a mapping of ``name`` and its options; none is dense.
        backward: How the backward pass is executed, such as ``{"sites": "branches"}``. ``update="eager"`` and
            ``checkpointing="full"`` are refused: the trainer steps its optimizer itself, and checkpointing of whole
            layers is an option of ``TrainingArguments``.
        reference: As for :func:`sparsebp_cli.attach`.
        policy_seed: Of random decisions; None: ``args.seed``.
        log_flops_every: Optimizer steps, at least 1, between counts of the FLOPs of one micro-batch, dense and with the
            policies; the first step is always counted, and the counts are logged. Each count computes the loss twice
            more, on copies of the batch, and changes nothing else. None: never.
        **kwargs: As for ``Trainer``.

    Raises:
        UsageError: A policy, an option or a pattern is wrong.
        UnsupportedError: A training argument is not supported: DeepSpeed, FSDP, Liger, and others.
    """

    def __init__(
        self,
        *args: Any,
        policies: Sequence[PolicyLike] = (),
        backward: BackwardOptions | BackwardChoices | None = None,
        reference: nn.Module | Literal["batch"] | None = None,
        policy_seed: int | None = None,
        log_flops_every: int | None = 500,
        **kwargs: Any,
    ) -> None:
        for name in BackwardOptions.model_fields:
            if name in kwargs:
                raise UsageError(f"{name} is an option of the backward pass: give backward={{{name!r}: ...}}")
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
        """The engine of the current ``train()``, or of the last one; None before the first."""
        return self.policy_callback.engine
