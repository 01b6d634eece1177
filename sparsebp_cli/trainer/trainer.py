"""``transformers.Trainer`` with policies: all that it does is the callback's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import Trainer

from sparsebp_cli.backward import Engine
from sparsebp_cli.trainer.callback import PolicyCallback
from sparsebp_cli.trainer.choice import Chosen


class PolicyTrainer(Trainer):
    """A ``transformers.Trainer`` whose backward is decided by policies: every argument of its, and those below.

    While ``train()`` runs the engine is attached; afterwards, however it ended, the model is as it was. Evaluation is
    dense. Without an approximating policy the trained weights are those of ``Trainer``, bit for bit.

    Args:
        *args: As for ``Trainer``.
        policies: Each a policy, the name of one, or a mapping of ``name`` and its options; none is dense.
        sites: Where gradient policies are asked; see :func:`sparsebp_cli.attach`, also for the next three.
        exclude: Globs over module names; what matches stays dense.
        engine: ``fast`` or ``reference``.
        checkpointing: ``none`` or ``sparse``; activation checkpointing of whole layers is ``TrainingArguments``' own.
        policy_seed: Of random decisions; None: ``args.seed``.
        log_flops_every: At the first optimizer step and then at every so many, the FLOPs of one micro-batch, dense
            and with the policies, are counted and logged, at least 1; the loss is computed twice more for that, on
            copies of the batch, and nothing else changes. None: never.
        attach_options: Further arguments of ``attach``.
        **kwargs: As for ``Trainer``.

    Raises:
        UsageError: A policy, an option or a pattern is wrong.
        UnsupportedError: Something in the training arguments that is not built: DeepSpeed, FSDP, Liger, and others.
    """

    def __init__(
        self,
        *args: Any,
        policies: Sequence[Chosen] = (),
        sites: str = "linears",
        exclude: Iterable[str] = (),
        engine: str = "fast",
        checkpointing: str = "none",
        policy_seed: int | None = None,
        log_flops_every: int | None = 500,
        attach_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        callback = PolicyCallback(
            policies,
            sites=sites,
            exclude=exclude,
            engine=engine,
            checkpointing=checkpointing,
            seed=policy_seed,
            log_flops_every=log_flops_every,
            attach_options=attach_options,
        )
        super().__init__(*args, **kwargs)
        self.policy_callback: PolicyCallback = callback.join(self)

    @property
    def engine(self) -> Engine | None:
        """The engine of the ``train()`` under way, or of the last one; None before the first."""
        return self.policy_callback.engine
