"""``audit --examples`` finds losses and models that couple examples in ways that no single output shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import ways
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from sparsebp_audit.report import IsolationReport

pytestmark = pytest.mark.filterwarnings("ignore")
VOCABULARY = 32


class Tiny(nn.Module):
    """Embeddings, a layer that a test may change, and a head; its output has the hidden states as well."""

    def __init__(self, change: Callable[[Tensor, Tiny], Tensor] = lambda h, _: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY)
        self.change, self.kept = change, list[Tensor]()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        h = self.change(torch.tanh(self.layer(self.table(input_ids))), self)
        return {"logits": self.head(h), "hidden": h}


def each(output: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return the loss of every position."""
    return cross_entropy(output["logits"][:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def judge(model: nn.Module, loss: Callable[[Any, Tensor], Tensor], batches: int = 1) -> IsolationReport:
    generator = torch.Generator().manual_seed(1)

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(batches):
            ids = torch.randint(3, VOCABULARY, (4, 7), generator=generator)
            loss(model.train()(ids), ids).backward()
        optimizer.step()

    return ways.judge(train)


def contrast(output: Any, _: Tensor) -> Tensor:
    vectors = normalize(output["hidden"].mean(1), dim=-1)
    return cross_entropy(vectors @ vectors.T * 5, torch.tensor([1, 0, 3, 2]))


def decorrelate(output: Any, _: Tensor) -> Tensor:
    h = output["hidden"].mean(1)
    centred = h - h.mean(0)
    covariance: Tensor = centred.T @ centred / len(h)
    return (covariance - torch.eye(16)).square().sum()


def both(output: Any, ids: Tensor) -> Tensor:
    return each(output, ids).mean() + 0.1 * decorrelate(output, ids)


def focal(output: Any, ids: Tensor) -> Tensor:
    c = each(output, ids)
    weight = c.detach()
    return (c * weight / weight.sum()).sum()


def over_largest(output: Any, ids: Tensor) -> Tensor:
    c = each(output, ids)
    return (c / c.detach().max()).sum()


def hardest_half(output: Any, ids: Tensor) -> Tensor:
    c = each(output, ids)
    return (c * (c.detach() >= c.detach().median())).sum() / 12


def hardest_example(output: Any, ids: Tensor) -> Tensor:
    return each(output, ids).mean(1).max()


def baseline(output: Any, ids: Tensor) -> Tensor:
    c = each(output, ids).mean(1)
    return ((c.detach() - c.detach().mean()) * c).mean()


def importance(output: Any, ids: Tensor) -> Tensor:
    weight = (-each(output, ids).mean(1)).detach().softmax(0)
    return (weight * each(output, ids).mean(1)).sum()


def written(output: Any, ids: Tensor) -> Tensor:
    weight = torch.zeros(4)
    weight[:] = each(output, ids).mean(1).detach()
    weight /= weight.sum()
    return (weight * each(output, ids).mean(1)).sum()


def balanced(output: Any, ids: Tensor) -> Tensor:
    share = output["logits"].softmax(-1).mean((0, 1))
    return each(output, ids).mean() + 5 * (share * share.detach()).sum()


COUPLED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "negatives by hidden states": contrast,
    "covariance of hidden states": decorrelate,
    "covariance beside a cross-entropy": both,
    "weights over their sum": focal,
    "a loss over its largest": over_largest,
    "the hardest half": hardest_half,
    "the hardest example": hardest_example,
    "a baseline that is the mean": baseline,
    "self-normalised importance": importance,
    "weights that were written in place": written,
    "balance of what is predicted": balanced,
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_examples_is_not_called_that_of_each_example_alone(name: str) -> None:
    report = judge(Tiny(), COUPLED[name])
    assert [loss.kind for loss in report.losses] == ["purpose"], name
    assert "the loss reads several examples" in report.headline


def store(h: Tensor, model: Tiny) -> Tensor:
    model.kept[:] = [h]
    return h


def test_a_hidden_state_that_a_script_kept_inside_of_the_model_is_a_channel_too() -> None:
    model = Tiny(store)

    def loss(output: Any, ids: Tensor) -> Tensor:
        return each(output, ids).mean() + 0.1 * decorrelate({"hidden": model.kept[0]}, ids)

    assert [found.kind for found in judge(model, loss).losses] == ["purpose"]


def test_a_loss_that_passes_the_outputs_by_is_not_judged() -> None:
    model = Tiny()
    model.forward = lambda input_ids: {  # type: ignore[method-assign]
        "logits": model.head(model.table(input_ids)),
        "loss": _fused(model, input_ids),
    }
    report = judge(model, lambda output, _: output["loss"])
    assert "not only the model's outputs" in report.unread_losses
    assert report.headline.endswith("the loss was not judged")


def _fused(model: Tiny, ids: Tensor) -> Tensor:
    return cross_entropy((model.table(ids) @ model.head.weight.T).flatten(0, 1), ids.roll(-1, 1).flatten())


def queue(h: Tensor, model: Tiny) -> Tensor:
    model.kept.append(h.detach().mean((0, 1)))
    return h + model.kept[-2] if len(model.kept) > 1 else h


def cached_keys(h: Tensor, model: Tiny) -> Tensor:
    """As a cache that is written for one example and read for the next."""
    before = h.new_zeros(1, *h.shape[1:])
    return h + 0.5 * torch.cat([before, h[:-1].detach()])


def capacity(h: Tensor, _: Tiny) -> Tensor:
    """As experts that choose the tokens which they take, out of the whole batch."""
    score = h.detach().sum(-1)
    return h * (1 + (score >= score.flatten().topk(5).values[-1]))[..., None]


def scale(h: Tensor, _: Tiny) -> Tensor:
    """As activations that are rounded by the largest of the batch."""
    step = h.detach().abs().max() / 15
    return h + ((h / step).round() * step - h).detach()


MIXED: dict[str, Callable[[Tensor, Tiny], Tensor]] = {
    "a cache between examples": cached_keys,
    "experts that choose tokens": capacity,
    "a scale of the batch": scale,
    "centring": lambda h, _: h - h.mean(0).detach(),
}


@pytest.mark.parametrize("name", MIXED)
def test_reads_of_other_examples_without_a_gradient_are_found_with_their_cause(name: str) -> None:
    (batch,) = judge(Tiny(MIXED[name]), lambda output, ids: each(output, ids).mean()).batches
    assert batch.verdict == "mixed"
    assert batch.cause.endswith("reads other examples through values without a gradient")


def test_a_model_with_a_state_across_batches_is_not_judged() -> None:
    report = judge(Tiny(queue), lambda output, ids: each(output, ids).mean(), batches=2)
    assert {batch.verdict for batch in report.batches} == {"unjudged"}


CLEAN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mean": lambda output, ids: each(output, ids).mean(),
    "own weights": lambda output, ids: (each(output, ids) * each(output, ids).detach()).mean(),
    "own normalisation": lambda o, ids: (each(o, ids) / each(o, ids).detach().sum(1, keepdim=True)).sum(),
    "own clip": lambda output, ids: each(output, ids).clamp(max=3.3).sum(),
    "hidden states of its own": lambda o, ids: each(o, ids).mean() + o["hidden"].square().mean(),
    "smoothing": lambda o, ids: cross_entropy(o["logits"].transpose(1, 2), ids, label_smoothing=0.1),
    "a running total": lambda output, ids: _logged(each(output, ids)),
    "an entropy": lambda o, _: (o["logits"].softmax(-1) * o["logits"].log_softmax(-1)).sum(-1).mean(),
}


def _logged(c: Tensor) -> Tensor:
    total = torch.zeros(())
    total += c.detach().mean()
    return c.mean()


@pytest.mark.parametrize("name", CLEAN)
def test_a_loss_that_is_a_sum_over_examples_raises_no_alarm(name: str) -> None:
    report = judge(Tiny(), CLEAN[name])
    assert report.losses == ()
    assert report.unread_losses == ""
    assert report.headline.startswith("each example's gradient is that of the example alone")


def test_a_penalty_on_parameters_is_no_path_through_the_model() -> None:
    model = Tiny()
    report = judge(model, lambda o, ids: each(o, ids).mean() + 0.1 * model.layer.weight.square().sum())
    assert (report.losses, report.unread_losses) == ((), "")


def test_running_a_loss_again_changes_nothing_of_the_script() -> None:
    totals = []
    for examples in (False, True):
        model, total = Tiny().train(), torch.zeros(())

        def train(model: Any = model, total: Tensor = total) -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            ids = torch.arange(28).view(4, 7)
            loss = focal(model(ids), ids)
            total += loss.detach()
            loss.backward()
            optimizer.step()

        _ = ways.judge(train) if examples else train()
        totals.append((float(total), float(model.head.weight.detach().sum())))
    assert totals[0] == totals[1]
