"""Ways to the same gradient that `peers.py` compares: those of libraries, by hand, and `lossless`.

Every way gives the gradient of one number: the sum of the losses of all labels of a unit of work, over their number.
Its function is what a user writes for it, and its lines are counted from there; where a library does it by an option,
the option is the line.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

import sparsebp_cli as sbp

IGNORED = -100
Batch = dict[str, Any]
Run = Callable[[Any, list[Batch], int], None]


@dataclass(frozen=True)
class Example:
    """A text whose first ``prompt`` tokens, at least one, are not trained."""

    token_T: Tensor
    prompt: int


@dataclass(frozen=True)
class Unit:
    """The examples of one update, in the order in which they are cut into batches."""

    examples: tuple[Example, ...]
    batch_size: int
    shares_prompts: bool  # between examples

    @property
    def num_labels(self) -> int:
        """How many labels all examples have."""
        return sum(len(example.token_T) - example.prompt for example in self.examples)

    @property
    def features(self) -> list[dict[str, list[int]]]:
        """The examples as a dataset holds them."""
        return [
            {"input_ids": tokens, "labels": [IGNORED] * example.prompt + tokens[example.prompt :]}
            for example in self.examples
            for tokens in [example.token_T.tolist()]
        ]

    def collate(self, collator: Any, size: int | None = None) -> list[Batch]:
        """Return the batches that a collator makes, of ``size`` examples each; None: as the unit says."""
        size, features = size or self.batch_size, self.features
        batches = [collator(features[start : start + size]) for start in range(0, len(features), size)]
        return [{name: value for name, value in batch.items() if value is not None} for batch in batches]

    def pack(self) -> list[Batch]:
        """Return rows as trl packs them, as long as the longest example or 512 tokens."""
        room = max(512, *(len(example.token_T) for example in self.examples))
        rows = pack_dataset(Dataset.from_list(self.features), room, "bfd")
        return [DataCollatorForLanguageModeling(0, padding_free=True)([row]) for row in rows]

    def group(self) -> list[Batch]:
        """Return, for each prompt, the prompt (1, P) and what follows it in each example, padded on the right."""
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for example in self.examples:
            answers = groups.setdefault(tuple(example.token_T[: example.prompt].tolist()), [])
            answers.append(example.token_T[example.prompt :])
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return [
            {
                "prompt": torch.tensor(prompt)[None],
                "answers": pad(answers),
                "mask": pad([torch.ones_like(a) for a in answers]),
            }
            for prompt, answers in groups.items()
        ]


def run_labels(model: Any, batches: list[Batch], total: int) -> None:
    """Give labels to the model; the plain step."""
    for batch in batches:
        model(**batch, num_items_in_batch=total).loss.backward()


def run_sliced(model: Any, batches: list[Batch], total: int) -> None:
    """Run the head of a padded batch at columns in which any example has a label."""
    for batch in batches:
        labels = batch["labels"][:, 1:]
        columns = (labels != IGNORED).any(0).nonzero().flatten()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, logits_to_keep=columns).logits.flatten(0, 1)
        (cross_entropy(logits, labels[:, columns].flatten(), reduction="sum") / total).backward()


def run_by_hand(model: Any, batches: list[Batch], total: int) -> None:
    """Run the head of a row of texts at its labels."""
    for batch in batches:
        row = (batch["labels"][0, 1:] != IGNORED).nonzero().flatten()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, logits_to_keep=row).logits[0]
        (cross_entropy(logits, batch["labels"][0, row + 1], reduction="sum") / total).backward()


def run_torch(model: Any, batches: list[Batch], total: int) -> None:
    """Run the body on a row of texts, and PyTorch's loss in chunks at its labels."""
    options = nn.LinearCrossEntropyOptions()
    for batch in batches:
        row = (batch["labels"][0, 1:] != IGNORED).nonzero().flatten()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        hidden = model.model(**inputs).last_hidden_state[0, row]
        label, weight = batch["labels"][0, row + 1], model.lm_head.weight
        loss = nn.functional.linear_cross_entropy(hidden, weight, label, reduction="sum", options=options)
        (loss / total).backward()


def run_liger(model: Any, batches: list[Batch], total: int) -> None:
    """Run the body on a row of texts, and Liger's loss in chunks at its labels."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    for batch in batches:
        row = (batch["labels"][0, 1:] != IGNORED).nonzero().flatten()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        hidden = model.model(**inputs).last_hidden_state[0, row]
        label, weight = batch["labels"][0, row + 1], model.lm_head.weight
        (LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, label).sum() / total).backward()


def run_fused(model: Any, batches: list[Batch], total: int) -> None:
    """Run trl's head in tiles."""
    for batch in batches:
        model(**batch, fused_lm_head=True, num_items_in_batch=total).loss.backward()


def run_cached(model: Any, batches: list[Batch], total: int) -> None:
    """Run each prompt once, with a cache that has a graph, and its answers behind it."""
    for batch in batches:
        prompt, answers, mask = batch["prompt"], batch["answers"], batch["mask"]
        first = model.model(input_ids=prompt, use_cache=True)
        cache = first.past_key_values
        cache.batch_repeat_interleave(len(answers))
        whole = torch.cat([torch.ones(len(answers), prompt.shape[1], dtype=torch.long), mask], 1)
        inputs = {"input_ids": answers, "attention_mask": whole, "past_key_values": cache}
        hidden = model.model(**inputs, use_cache=True).last_hidden_state
        before = first.last_hidden_state[:, -1:].expand(len(answers), -1, -1)
        hidden = torch.cat([before, hidden[:, :-1]], 1)[mask.bool()]
        (cross_entropy(model.lm_head(hidden), answers[mask.bool()], reduction="sum") / total).backward()


def run_engine(engine: sbp.Engine, model: Any, batches: list[Batch], total: int) -> None:
    """Let the engine run the backward of the plain step."""
    for batch in batches:
        engine.backward(model(**batch, num_items_in_batch=total).loss)


def run_update(engine: sbp.Engine, model: Any, batches: list[Batch], total: int) -> None:
    """Let the engine share prefixes between the batches of an update, as a trainer does."""
    engine.expect(batches)
    run_engine(engine, model, batches, total)


def count_lines(run: Run) -> int:
    """Return how many lines a function has that the plain step does not."""

    def count(function: Run) -> int:
        return len(inspect.getsource(function).split('"""', 2)[2].strip().splitlines())

    return count(run) - count(run_labels)


@dataclass(frozen=True)
class Way:
    """One way: what runs, what it is given, and what a user adds to the plain step for it."""

    run: Run
    batches: Callable[[Unit], list[Batch]]
    option: str = ""  # of a library or a trainer, each in a line
    needs: str = ""  # a package
    only_shared: bool = False  # for examples that share prompts
    policy: dict[str, Any] | None = None  # options of lossless

    @property
    def lines(self) -> int:
        """Lines that a user adds."""
        return count_lines(self.run) + len(self.option.splitlines())

    def refusal(self, unit: Unit) -> str:
        """Return why the way is not there, or nothing."""
        if self.needs and find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        if self.run is run_torch and not hasattr(nn, "LinearCrossEntropyOptions"):
            return "PyTorch before 2.13"
        return "no prompt is shared" if self.only_shared and not unit.shares_prompts else ""

    def prepare(self, model: Any, unit: Unit, stack: ExitStack) -> tuple[Any, Callable[[], None]]:
        """Return the model of this way, and a function without arguments that runs its pass."""
        run, batches = self.run, self.batches(unit)
        if self.run is run_fused:
            add_fused_lm_head(model := copy.deepcopy(model))
        elif self.policy is not None:
            model = copy.deepcopy(model)
            engine = stack.enter_context(sbp.attach(model, sbp.make_policy("lossless", **self.policy)))
            run = partial(run_update if "prefixes" in self.policy else run_engine, engine)
        return model, partial(run, model, batches, unit.num_labels)


def _pad(unit: Unit) -> list[Batch]:
    return unit.collate(DataCollatorForLanguageModeling(0))


def _pad_all(unit: Unit) -> list[Batch]:
    return unit.collate(DataCollatorForLanguageModeling(0), len(unit.examples))


def _pad_one(unit: Unit) -> list[Batch]:
    """In the order of their tokens, so that those of one prefix follow each other."""
    ordered = sorted(unit.examples, key=lambda example: example.token_T.tolist())
    return replace(unit, examples=tuple(ordered)).collate(DataCollatorForLanguageModeling(0), 1)


def _flatten(unit: Unit) -> list[Batch]:
    return unit.collate(DataCollatorWithFlattening())


def _flatten_one(unit: Unit) -> list[Batch]:
    return unit.collate(DataCollatorWithFlattening(), 1)


def _free(unit: Unit) -> list[Batch]:
    return unit.collate(DataCollatorForLanguageModeling(0, padding_free=True))


FLATTENING = "data_collator=DataCollatorWithFlattening()"
LOSSLESS = 'sbp.PolicyCallback("lossless").join(trainer)'
LEAST = 'sbp.PolicyCallback(sbp.make_policy("lossless", prefixes="update")).join(trainer)'
ONE = "per_device_train_batch_size=1, gradient_accumulation_steps=EXAMPLES"
WAYS: dict[str, Way] = {
    "padded": Way(run_labels, _pad),
    "logits_to_keep": Way(run_sliced, _pad),
    "trl, fused head": Way(run_fused, _pad),
    "DataCollatorWithFlattening": Way(run_labels, _flatten, option=FLATTENING),
    "trl, padding_free": Way(run_labels, _free, option="padding_free=True"),
    "trl, packing": Way(run_labels, Unit.pack, option="packing=True"),
    "by hand": Way(run_by_hand, _flatten, option=FLATTENING),
    "by hand, linear_cross_entropy": Way(run_torch, _flatten, option=FLATTENING),
    "by hand, Liger": Way(run_liger, _flatten, option=FLATTENING, needs="liger_kernel"),
    "by hand, prompt cached": Way(run_cached, Unit.group, only_shared=True),
    "one at a time": Way(run_by_hand, _flatten_one, option=ONE),
    "lossless": Way(run_labels, _pad, option=LOSSLESS, policy={}),
    "lossless, one batch": Way(run_labels, _pad_all, option=LOSSLESS, policy={}),
    "lossless, one at a time": Way(run_labels, _pad_one, option=f"{LEAST}\n{ONE}", policy={"prefixes": "update"}),
}


def find_gradient(model: Any) -> Iterator[Tensor]:
    """Yield the gradient of each parameter."""
    for parameter in model.parameters():
        yield torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def run_alone(model: Any, examples: Sequence[Example], total: int) -> list[Tensor]:
    """Return the gradient in double precision, of one example at a time: the truth."""
    wide = copy.deepcopy(model).double()
    for example in examples:
        labels = example.token_T.clone()
        labels[: example.prompt] = IGNORED
        wide(input_ids=example.token_T[None], labels=labels[None], num_items_in_batch=total).loss.backward()
    return list(find_gradient(wide))
