"""A trained prompt of peft (prompt tuning, p-tuning) before every example: one shared segment.

peft passes embeddings to the model instead of tokens, so the model cannot compare prefixes. This module records the
tokens that peft receives, and gives the prompt's tokens new numbers. It checks in each batch that equal tokens have
equal embeddings. They come from the same parameters, so the gradient of a shared row is the sum over its examples.

Shape letters: B examples, T positions including the prompt, U different tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.kind.packing.groups import Ints, to_tensor
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches
from sparsebp_cli.errors import UnsupportedError


@final
class SoftPrompt(ForwardOverride):
    """The ``forward`` of peft's wrapper, which records the tokens of the batch."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._ids: Tensor | None = None  # token ids of the running forward

    @classmethod
    def find(cls, model: nn.Module) -> SoftPrompt | None:
        """Return the override for a model; None if peft puts no prompt before its examples.

        Raises :class:`UnsupportedError` for a prompt of keys and values.
        """
        for module in model.modules():
            config: Any = getattr(module, "active_peft_config", None)
            if getattr(config, "is_prompt_learning", False):
                kind = str(getattr(config.peft_type, "value", config.peft_type))
                if kind in {"PREFIX_TUNING", "CARTRIDGE"}:
                    raise UnsupportedError(
                        f"{type(module).__name__} trains a prefix of keys and values in each layer ({kind}), "
                        "which lossless does not support: train a prompt of embeddings (PromptTuningConfig, "
                        "PromptEncoderConfig) or LoRA instead, or train without lossless"
                    )
                return cls(module)
        return None

    def install(self, patches: ForwardPatches) -> None:
        """Override the wrapper's forward."""
        patches.install(self.module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapper."""
        ids = bind_arguments(self.module, args, kwargs).get("input_ids")
        before, self._ids = self._ids, ids if isinstance(ids, Tensor) and not self.is_removed else None
        try:
            return self.run_covered(self.module, *args, **kwargs)
        finally:
            self._ids = before

    def find_tokens(self, inputs: Mapping[str, Any]) -> Ints | None:
        """Return a number for each position of a batch of embeddings (B, T), the same for equal tokens. Return None if
        the tokens are unknown, or equal tokens have different embeddings."""
        embeds_BTD, ids = inputs.get("inputs_embeds"), self._ids
        if not isinstance(embeds_BTD, Tensor) or ids is None or ids.dim() != 2 or len(ids) != len(embeds_BTD):
            return None
        num_virtual = embeds_BTD.shape[1] - ids.shape[1]
        if num_virtual <= 0:
            return None
        virtual = np.broadcast_to(-1 - np.arange(num_virtual), (len(ids), num_virtual))
        token_BT: Ints = np.concatenate((virtual, ids.cpu().numpy()), axis=1)
        with torch.no_grad():
            table_UD, number_BT = make_table(embeds_BTD, token_BT)
            return token_BT if torch.equal(table_UD[number_BT], embeds_BTD) else None


def make_table(embeds_BTD: Tensor, token_BT: Ints) -> tuple[Tensor, Tensor]:
    """Return the embedding of each token (U, D), and the number of the token of each position (B, T)."""
    _, first_U, number_N = np.unique(token_BT, return_index=True, return_inverse=True)
    device = embeds_BTD.device
    table_UD = embeds_BTD.flatten(0, 1).index_select(0, to_tensor(first_U, device))
    return table_UD, to_tensor(number_N.reshape(token_BT.shape), device)
