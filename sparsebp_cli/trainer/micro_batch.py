"""The micro-batches of one optimizer step of a trainer, for policies that compute their common prefixes once.

A ``transformers.Trainer`` draws all of them before the first. trl's generating trainers draw prompts at that time. They
have the micro-batches in their own buffer after the first micro-batch of a generation is prepared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from transformers import Trainer

IGNORED = -100  # a label that trains nothing, as in transformers
Weigh = Callable[[Mapping[str, Any]], Tensor | None]
# Methods that determine the forwards' arguments in trl's GRPOTrainer and RLOOTrainer. Subclasses may override them.
OF_GENERATION = ("_prepare_inputs", "_compute_loss", "_get_per_token_logps_and_entropies")


@final
class MicroBatches:
    """The micro-batches of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        kind = type(trainer)
        owners = {str(getattr(getattr(kind, name, None), "__module__", "")).partition(".")[0] for name in OF_GENERATION}
        self._generates = owners == {"trl"} and hasattr(trainer, "_buffered_inputs")
        self._left = self._known = 0  # micro-batches of this step not yet prepared, and how many of them are announced

    def begin(self, batches: Sequence[object]) -> list[dict[str, Any]]:
        """Begin a step with the drawn batches. Return the arguments of their forwards; none for a single batch, or if
        they are not known yet."""
        self._left, self._known = len(batches), 0
        drawn = [batch for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch]
        if len(batches) < 2 or len(drawn) < len(batches):
            return []
        return [self._label(batch) for batch in drawn]

    def take(self, weigh: Weigh) -> list[dict[str, Any]]:
        """Record that the next micro-batch is prepared. If the forwards' arguments of this and the following
        micro-batches of the step have become known, return them. ``weigh`` returns the factor of each example's loss in
        a micro-batch, or None."""
        trainer, is_announced = self._trainer, self._known > 0
        known, left = max(self._known - 1, 0), self._left
        self._left, self._known = max(left - 1, 0), known
        if not self._generates or is_announced or not trainer.model.training or not trainer._buffered_inputs:  # noqa: SLF001 - trl's own
            return []
        # The trainer uses the buffered generation num_iterations times. The next one may begin within a step.
        size = trainer.args.steps_per_generation
        place = trainer._step  # noqa: SLF001 - trl's own count of micro-batches
        num = min(left, size * trainer.num_iterations - place % (size * trainer.num_iterations))
        made = [self._generated(trainer._buffered_inputs[(place + n) % size], weigh) for n in range(num)]  # noqa: SLF001
        found = [one for one in made if one is not None]
        if len(made) < 2 or len(found) < len(made):
            return []
        self._known = len(made) - 1
        return found

    def _label(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch with the labels that trl's preference trainers make from a mask in their loss."""
        ids, mask = batch["input_ids"], batch.get("completion_mask")
        is_marked = isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape
        if not is_marked or "labels" in batch:
            return dict(batch)
        return {**batch, "labels": ids.masked_fill(mask == 0, IGNORED), **self._options}

    def _generated(self, inputs: Mapping[str, Any], weigh: Weigh) -> dict[str, Any] | None:
        """Return the forward's arguments for generated answers; None if there are others, such as pictures."""
        scored = inspect.signature(self._trainer._get_per_token_logps_and_entropies).parameters  # noqa: SLF001
        if any(inputs[name] is not None for name in scored.keys() & inputs.keys()):
            return None
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
        mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, : inputs["prompt_ids"].shape[1]] = IGNORED
        weight = weigh(inputs)
        given = {"input_ids": ids, "attention_mask": mask, "labels": labels, **self._options}
        return given if weight is None else {**given, "example_weight": weight}

    @property
    def _options(self) -> dict[str, Any]:
        """Further arguments of the forwards in trl's trainers that compute their own loss."""
        balances = {"output_router_logits": True} if getattr(self._trainer, "aux_loss_enabled", False) else {}
        return {"fused_lm_head": True, **balances}
