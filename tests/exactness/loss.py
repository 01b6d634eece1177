"""Ways in which a script makes its loss of what a model returns.

Each takes the script, a batch and a seed, and returns the loss. The same function runs on the plain model and on the
attached one; the script passes declarations on to the engine, if there is one.

Shape letters: B examples, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad, relu

from tests.exactness.batch import IGNORED, Batch


class Script:
    """A training script: a model, and the engine that is attached to it, if any."""

    def __init__(self, model: Any, engine: Any = None, embedding: Any = None) -> None:
        self.model, self.engine = model, engine
        self.embedding = embedding

    def columns(self, **columns: Tensor) -> None:
        """Declare columns of the batch."""
        if self.engine is not None:
            self.engine.columns(**columns)

    def scoring(self, labels: Tensor) -> AbstractContextManager[object]:
        """Declare that logits are read at labels."""
        return nullcontext() if self.engine is None else self.engine.scoring(labels)


def _given(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    label = batch["labels"][:, 1:]
    return label, label != IGNORED


def _real(batch: Batch) -> Tensor:
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _entropy_of_labels(logits: Tensor, batch: Batch) -> Tensor:
    label, is_trained = _targets(batch)
    return cross_entropy(logits[:, :-1][is_trained].float(), label[is_trained], reduction="sum") / 7


def model(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The model's own loss."""
    loss: Tensor = script.model(**batch).loss
    return loss


def items(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The model's own loss, divided by the labels of a whole step."""
    loss: Tensor = script.model(**batch, num_items_in_batch=torch.tensor(13)).loss
    return loss


def logits(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Cross-entropy of the logits by the script itself."""
    return _entropy_of_labels(script.model(**_given(batch)).logits, batch)


def given_labels(script: Script, batch: Batch, seed: int) -> Tensor:
    """The same, with the labels declared to the engine."""
    script.columns(labels=batch["labels"])
    return logits(script, batch, seed)


def token_weights(script: Script, batch: Batch, seed: int) -> Tensor:
    """The model's loss with a weight for each token."""
    weight = torch.randint(0, 3, batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed)) * 0.7
    if script.engine is not None:
        script.columns(loss_weight=weight)
        loss: Tensor = script.model(**batch).loss
        return loss
    label, is_trained = _targets(batch)
    z = script.model(**_given(batch)).logits[:, :-1]
    each = cross_entropy(z[is_trained].float(), label[is_trained], reduction="none")
    return (each * weight[:, 1:][is_trained]).sum() / is_trained.sum()


def example_weights(script: Script, batch: Batch, seed: int) -> Tensor:
    """A loss of the script's own with a weight for each example, such as an advantage."""
    weight = torch.tensor([0.0, 1.3, 0.0, -0.7, 2.0])[(torch.arange(len(batch["input_ids"])) + seed) % 5]
    label, is_trained = _targets(batch)
    script.columns(labels=batch["labels"], example_weight=weight)
    z = script.model(**_given(batch)).logits[:, :-1]
    each = cross_entropy(z[is_trained].float(), label[is_trained], reduction="none")
    return (each * weight[:, None].expand(is_trained.shape)[is_trained]).sum() / 5


def smoothing(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Label smoothing as transformers' Trainer has it."""
    from transformers.trainer_pt_utils import LabelSmoother

    loss: Tensor = LabelSmoother(0.1)(script.model(**_given(batch)), batch["labels"], shift_labels=True)
    return loss


def z_loss(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Cross-entropy and the squared log of the partition function, at labels."""
    z = script.model(**_given(batch)).logits
    return _entropy_of_labels(z, batch) + 0.1 * z[:, :-1][_targets(batch)[1]].logsumexp(-1).square().sum()


def distillation(script: Script, batch: Batch, seed: int) -> Tensor:
    """Cross-entropy with a teacher's probabilities at all positions that are no padding."""
    z = script.model(**_given(batch)).logits
    teacher = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed)).softmax(-1).to(z)
    return -(teacher * z.log_softmax(-1)).sum(-1)[_real(batch)].mean()


def margin_of_targets(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The squared margin between two tokens, at labels."""
    script.columns(labels=batch["labels"])
    z = script.model(**_given(batch)).logits[:, :-1][_targets(batch)[1]]
    return (z[:, 3] - z[:, 7]).square().sum() / 9


def margin_everywhere(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Cross-entropy at declared labels, and a margin at every position: what was not computed is read."""
    script.columns(labels=batch["labels"])
    z = script.model(**_given(batch)).logits
    return _entropy_of_labels(z, batch) + (z[..., 3] - z[..., 7]).square().mean()


def variance_everywhere(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Variance of the logits of every position, padding included."""
    z: Tensor = script.model(**_given(batch)).logits
    return z.var(-1).mean()


def hinge_everywhere(script: Script, batch: Batch, _seed: int) -> Tensor:
    """A hinge and the smallest logit of every position."""
    script.columns(labels=batch["labels"])
    z = script.model(**_given(batch)).logits
    return _entropy_of_labels(z, batch) + relu(z[..., 3] - z[..., 7] - 0.1).mean() + z.amin(1).mean()


def entropy_everywhere(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Cross-entropy at declared labels, less an entropy bonus at every position."""
    script.columns(labels=batch["labels"])
    z = script.model(**_given(batch)).logits
    return _entropy_of_labels(z, batch) + 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()


def _log_probability(z: Tensor, batch: Batch) -> Tensor:
    label, is_trained = _targets(batch)
    return z[:, :-1].log_softmax(-1)[is_trained].gather(1, label[is_trained][:, None])


def clipped_ratio(script: Script, batch: Batch, _seed: int) -> Tensor:
    """PPO's clipped ratio, with old log-probabilities of a plain forward."""
    with torch.no_grad():
        old = _log_probability(script.model(**_given(batch)).logits, batch)
    script.columns(labels=batch["labels"])
    ratio = (_log_probability(script.model(**_given(batch)).logits, batch) - old * 0.9).exp()
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2) + 0.1).sum() / 9


def scored_ratio(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The ratio with old log-probabilities of a forward that is declared to score."""
    with torch.no_grad(), script.scoring(batch["labels"]):
        old = _log_probability(script.model(**_given(batch)).logits, batch)
    script.columns(labels=batch["labels"])
    return -(_log_probability(script.model(**_given(batch)).logits, batch) - old * 0.9).exp().sum() / 9


def hidden_states(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The model's loss and the size of its hidden states where no padding is."""
    output = script.model(**batch, output_hidden_states=True)
    sizes = torch.stack([h[_real(batch)].square().mean() for h in output.hidden_states])
    return output.loss + sizes.sum() / 10


def attentions(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The model's loss, in a forward that is asked for attention weights."""
    loss: Tensor = script.model(**batch, output_attentions=True).loss
    return loss


def several_outputs(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The model's loss and its logits where no padding is."""
    output = script.model(**batch)
    return output.loss + output.logits[_real(batch)].square().mean() / 10


def last_token(script: Script, batch: Batch, _seed: int) -> Tensor:
    """A reward at the last token of each example."""
    z, real = script.model(**_given(batch)).logits, _real(batch).long()
    last = (real * torch.arange(real.shape[1])).argmax(1)
    chosen = z[torch.arange(len(last)), last][real.sum(1) > 0]
    return (chosen[:, 3] - chosen[:, 7]).square().mean()


def mean_pooling(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The mean of each example's logits, without padding."""
    z, real = script.model(**_given(batch)).logits, _real(batch)[..., None]
    pooled = torch.where(real, z, 0).sum(1) / real.sum(1).clamp(min=1)
    return pooled[:, 5].square().sum() + pooled[:, 9].sum()


def max_pooling(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The largest logits of each example, without padding."""
    z = script.model(**_given(batch)).logits
    return z.masked_fill(~_real(batch)[..., None], -50.0).amax(1)[:, :9].square().mean()


def shift_labels(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Labels that were shifted already, as loops with context parallelism give them."""
    shifted = pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].contiguous()
    loss: Tensor = script.model(**batch, shift_labels=shifted).loss
    return loss


def logits_to_keep(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Logits of the last positions alone."""
    kept = min(4, batch["input_ids"].shape[1])
    z = script.model(**_given(batch), logits_to_keep=kept).logits
    return z.log_softmax(-1)[..., 5][_real(batch)[:, -kept:]].sum()


def inputs_embeds(script: Script, batch: Batch, _seed: int) -> Tensor:
    """Embeddings by the script itself."""
    rest = {name: value for name, value in batch.items() if name != "input_ids"}
    loss: Tensor = script.model(**rest, inputs_embeds=script.embedding(batch["input_ids"])).loss
    return loss


def as_tuple(script: Script, batch: Batch, _seed: int) -> Tensor:
    """The model's loss out of a tuple."""
    loss: Tensor = script.model(**batch, return_dict=False)[0]
    return loss


def two_forwards(script: Script, batch: Batch, _seed: int) -> Tensor:
    """A comparison of two forwards, as pairs of preferences have it."""
    one = script.model(**batch).loss
    flipped = {n: v.flip(0) if isinstance(v, Tensor) and len(v) > 1 else v for n, v in batch.items()}
    two = script.model(**{n: v[:1] if isinstance(v, Tensor) else v for n, v in flipped.items()}).loss
    return -logsigmoid(two - one) + one


LOSSES: dict[str, Callable[[Script, Batch, int], Tensor]] = {
    "tuple": as_tuple,
    "z-loss": z_loss,
    **{
        function.__name__.replace("_", " "): function
        for function in (
            *(model, items, logits, given_labels, token_weights, example_weights, smoothing, distillation),
            *(margin_of_targets, margin_everywhere, variance_everywhere, hinge_everywhere, entropy_everywhere),
            *(
                clipped_ratio,
                scored_ratio,
                hidden_states,
                attentions,
                several_outputs,
                last_token,
                mean_pooling,
                max_pooling,
            ),
            two_forwards,
        )
    },
    "shift_labels": shift_labels,
    "logits_to_keep": logits_to_keep,
    "inputs_embeds": inputs_embeds,
}
