"""Which micro-batches make one optimizer step of a trainer, for policies that compute once what they have in common.

A ``transformers.Trainer`` draws them before the first. trl's trainers that generate draw prompts then, and have the
micro-batches in a buffer of their own once the first of a generation is prepared.
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
# Methods that decide what a forward of trl's GRPOTrainer or RLOOTrainer gets: another class may do so in another way.
OF_GENERATION = ("_prepare_inputs", "_compute_loss", "_get_per_token_logps_and_entropies")


@final
class MicroBatches:
    """The micro-batches of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        kind = type(trainer)
        owners = {str(getattr(getattr(kind, name, None), "__module__", "")).partition(".")[0] for name in OF_GENERATION}
        self._generates = owners == {"trl"} and hasattr(trainer, "_buffered_inputs")
        self._left = self._known = 0  # of this step: that were not prepared yet; of these, that were announced

    def begin(self, batches: Sequence[object]) -> list[dict[str, Any]]:
        """Begin a step of as many batches, as they were drawn; return the arguments of their forwards, none if there is
        nothing to share or they are not known yet."""
        self._left, self._known = len(batches), 0
        drawn = [batch for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch]
        if len(batches) < 2 or len(drawn) < len(batches):
            return []
        return [self._label(batch) for batch in drawn]

    def take(self, weigh: Weigh) -> list[dict[str, Any]]:
        """Note that the next micro-batch is prepared. Return the arguments of its forward and of those that follow it
        in this step, if they are known now and were not before. ``weigh`` returns what multiplies all that has a
        gradient in the loss of each example of a micro-batch, if anything does."""
        trainer, is_announced = self._trainer, self._known > 0
        known, left = max(self._known - 1, 0), self._left
        self._left, self._known = max(left - 1, 0), known
        if not self._generates or is_announced or not trainer.model.training or not trainer._buffered_inputs:  # noqa: SLF001 - trl's own
            return []
        # The buffer holds a generation; it is gone through num_iterations times, and the next may come within a step.
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
        """Return a batch with the labels that trl's trainers of preferences make of a mask when they compute a loss."""
        ids, mask = batch["input_ids"], batch.get("completion_mask")
        is_marked = isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape
        if not is_marked or "labels" in batch:
            return dict(batch)
        return {**batch, "labels": ids.masked_fill(mask == 0, IGNORED), **self._options}

    def _generated(self, inputs: Mapping[str, Any], weigh: Weigh) -> dict[str, Any] | None:
        """Return the arguments of the forward of answers that were generated; None: there are more, as of pictures."""
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
        """Other arguments of the forwards of trl's trainers that make a loss of their own."""
        balances = {"output_router_logits": True} if getattr(self._trainer, "aux_loss_enabled", False) else {}
        return {"fused_lm_head": True, **balances}
