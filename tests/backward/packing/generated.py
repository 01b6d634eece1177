"""Batches drawn at random from what a batch is to packing, and a judge of what was computed of them.

Every field of :class:`BatchFacts` is drawn, and a batch is made that has these facts, with labels, padding, prefixes,
dtypes and ways to give the inputs drawn beside them. The judge knows nothing of packing: it has the plain step, and
each sequence alone where the plain step mixes them.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.packing.batch import BatchFacts
from sparsebp_cli.errors import UnsupportedError
from tests.backward.isolation.enumeration import enlarge, every_enlarged_model
from tests.backward.token.test_every_decoder import tiny

IGNORED = -100
LENGTHS = (20, 32)  # T; a prefix is shared from 16 positions on
HIGHEST = 60  # position number plus one, for tables of 64
NAMES = tuple(name.name for name in fields(BatchFacts) if name.type == "bool")
WRONG = 1e-3  # error of a row of a gradient in float32 that no rounding explains: what was right is under 1e-4
MOST_TIMES, ROUNDING = 4.0, 0.05  # in bfloat16: how many times the plain step's own rounding, and beside it


def is_possible(facts: BatchFacts) -> bool:
    """Return whether there is a batch with these facts."""
    f = facts
    masked = f.has_gaps or f.pads_left or f.trains_padding or f.trains_gaps
    return (
        (f.has_mask or not masked)
        and (f.pads_left or not f.trains_padding)
        and (f.has_positions or (f.follows_columns and not f.has_fractions and f.begins_at_zero != f.pads_left))
        and (not f.holds_several or (f.has_positions and not f.has_mask and f.follows_columns))
    )


def draw_facts(rng: random.Random) -> BatchFacts:
    """Return facts of some batch."""
    while True:
        likely = dict.fromkeys(NAMES, 0.5) | {"has_fractions": 0.03, "trains_gaps": 0.15, "trains_padding": 0.3}
        if rng.random() < 0.15:  # no mask, which the others would rarely allow
            likely |= dict.fromkeys(("has_mask", "has_gaps", "pads_left", "trains_gaps", "trains_padding"), 0.0)
        facts = BatchFacts(**{name: rng.random() < likely[name] for name in NAMES}, largest=0)
        if is_possible(facts):
            return facts


def change_facts(facts: BatchFacts, rng: random.Random) -> BatchFacts:
    """Return facts that differ in few respects."""
    while True:
        flipped = {name: not getattr(facts, name) for name in rng.sample(NAMES, rng.randint(0, 3))}
        if is_possible(changed := replace(facts, **flipped)):
            return changed


def make_batch(facts: BatchFacts, rng: random.Random, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the arguments of a forward whose batch has these facts, all but the largest position number."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    rows, length = size or (rng.randint(2, 4), rng.randint(*LENGTHS))
    ids = torch.randint(3, 60, (rows, length), generator=generator)
    if rng.random() < 0.5:
        shared = rng.randint(10, length - 1)
        ids[:, :shared] = ids[:1, :shared]
    real = _draw_real(facts, rng, rows, length)
    batch: dict[str, Any] = {"input_ids": ids.masked_fill(~real, 0), "labels": _draw_labels(facts, rng, ids, real)}
    if facts.has_mask:
        batch["attention_mask"] = real.to(rng.choice((torch.long, torch.long, torch.bool, torch.float32)))
    several = facts.holds_several
    if facts.has_positions:
        given = _draw_positions(facts, rng, real)
        is_one = bool((given == given[:1]).all()) and rng.random() < 0.5
        batch["position_ids"] = given[:1] if is_one else given
    if several or (facts.has_positions and not facts.has_mask and not facts.follows_columns):
        batch["use_cache"] = not several  # transformers splits sequences without a cache alone
    elif rng.random() < 0.3:
        batch["use_cache"] = rng.random() < 0.5
    if rng.random() < 0.2:
        batch["num_items_in_batch"] = torch.tensor(17)
    return batch


def _draw_real(facts: BatchFacts, rng: random.Random, rows: int, length: int) -> Tensor:
    real = torch.ones(rows, length, dtype=torch.bool)
    if not facts.has_mask:
        return real
    for row in real[: rng.randint(0, rows)]:
        row[length - rng.randint(0, 6) :] = False  # nothing, for 0: the slice is empty
    first = rng.randrange(rows)
    for number, row in enumerate(real):
        if facts.pads_left and (number == first or rng.random() < 0.5):
            row[: rng.randint(1, 6)] = False
        if facts.has_gaps and (number == first or rng.random() < 0.5):
            start = rng.randint(7, length - 9)
            row[start : start + rng.randint(1, 2)] = False
    if rng.random() < 0.05 and rows > 2:
        real[(first + 1) % rows] = False  # an example of padding alone
    if facts.trains_gaps and not facts.has_gaps:
        real[first, -3:] = False
    return real


def _draw_labels(facts: BatchFacts, rng: random.Random, ids: Tensor, real: Tensor) -> Tensor:
    labels, length = ids.clone(), ids.shape[1]
    style = rng.choice(("dense", "completion", "scattered", "last", "early"))
    for row in labels:
        if style == "completion":
            row[: rng.randint(1, length - 1)] = IGNORED
        if style == "scattered":
            row[torch.tensor([rng.random() < 0.6 for _ in range(length)])] = IGNORED
        if style == "last":
            row[:-4] = IGNORED
        if style == "early":
            row[rng.randint(8, length) :] = IGNORED
        if rng.random() < 0.1:
            row[:] = IGNORED
    started, predictor = real.cumsum(1) > 0, real[:, :-1]
    # A label is read at the position before it: none before the first real position, and none that the mask hides.
    labels[:, 1:][~started[:, :-1]] = IGNORED
    if facts.trains_padding:
        places = (~started[:, :-1] & started[:, 1:]).nonzero()
        row_number, column = places[rng.randrange(len(places))].tolist()
        labels[row_number, column + 1] = ids[row_number, column + 1]
    hidden = ~predictor & started[:, :-1]
    labels[:, 1:][hidden] = IGNORED
    if facts.trains_gaps:
        row_number, column = hidden.nonzero()[rng.randrange(int(hidden.sum()))].tolist()
        labels[row_number, column + 1] = ids[row_number, column + 1]
    return labels


def _draw_positions(facts: BatchFacts, rng: random.Random, real: Tensor) -> Tensor:
    rows, length = real.shape
    columns = torch.arange(length)
    first = torch.where(real.any(1), real.long().argmax(1), 0)
    positions = columns - first[:, None]
    if facts.holds_several:
        for number, row in enumerate(positions):
            count = 2 if number == 0 else rng.randint(1, 3)
            starts = sorted(rng.sample(range(2, length - 1), count - 1))
            for start in starts:
                row[start:] = torch.arange(length - start) + (rng.choice((0, 0, 0, 5)) if start > 5 else 0)
    elif not facts.follows_columns:
        for row, at in zip(positions, first.tolist(), strict=True):
            _bend(row, at, rng)
    if not facts.begins_at_zero:
        chosen = rng.randrange(rows)
        shift = torch.tensor([rng.randint(2, 9) if n == chosen or rng.random() < 0.5 else 0 for n in range(rows)])
        positions = positions + shift[:, None]
    elif rng.random() < 0.2 and rows > 1:
        positions = positions.clamp(min=0)
    positions = positions.clamp(min=0) if rng.random() < 0.8 else torch.where(real, positions, 1)
    if rng.random() < 0.3 and facts.has_mask:
        positions = torch.where(real, positions, rng.choice((0, HIGHEST - 1)))
    positions = positions.clamp(max=HIGHEST - 1)
    if facts.has_fractions:
        return positions + 0.5 if facts.follows_columns else positions / 2 + 0.25
    if rng.random() < 0.1:
        return positions.float()
    return positions


def _bend(row: Tensor, first: int, rng: random.Random) -> None:
    """Let position numbers run otherwise than columns behind the first real one."""
    length, style = len(row) - first, rng.choice(("jump", "step", "restart", "repeat"))
    at = rng.randint(2, 5)
    if style == "jump":
        row[first + at :] += rng.randint(1, 20)
    if style == "step":
        row[first:] = torch.tensor([0, *(rng.choice((1, 1, 2)) for _ in range(length - 2)), 2]).cumsum(0)[:length]
        row[first + at :] += 1
    if style == "restart":
        row[first + at :] = torch.arange(length - at)
    if style == "repeat":
        row[first + at :] -= rng.randint(1, 2)


@dataclass
class Count:
    """What became of the batches of one family."""

    packed: int = 0  # and right
    plain: int = 0  # nothing to leave out, and right
    refused: int = 0  # by the batch's facts, and run plainly
    noticed: int = 0  # by the comparison, from which on the plain step is used
    wrong: int = 0
    alone: int = 0  # of the packed: equal to each sequence alone, which the plain step is not
    unjudged: int = 0  # the plain step itself fails
    reasons: Counter[str] = field(default_factory=Counter)  # of refusals, and what was noticed
    cases: list[str] = field(default_factory=list)  # of what is wrong: its seed, facts and error
    seen: list[str] = field(default_factory=list)  # the same of what the comparison noticed

    @property
    def judged(self) -> int:
        """Batches with a verdict."""
        return self.packed + self.plain + self.refused + self.noticed + self.wrong


@dataclass(frozen=True)
class Step:
    """Loss and gradients of one step, by parameter."""

    loss: float
    grads: tuple[Tensor, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the gradients are: the mean loss of a batch without a label is no number, and its gradient is 0."""
        return all(bool(g.isfinite().all()) for g in self.grads)

    def error(self, other: Step) -> float:
        """Return the largest error of a row of a gradient, and of the loss, relative to this one's rows; infinite where
        the other one is no number."""
        if math.isnan(self.loss) != math.isnan(other.loss) or not other.is_finite:
            return math.inf
        worst = 0.0 if math.isnan(self.loss) else abs(other.loss - self.loss) / max(abs(self.loss), 1e-3)
        pairs = [_by_row(*both) for both in zip(self.grads, other.grads, strict=True)]
        # A row of nearly nothing, such as a bias of keys has, is judged beside the others.
        least = max(1e-3 * max(float(one.norm(dim=-1).mean()) for one, _ in pairs), 1e-9)
        for one, two in pairs:
            size = one.norm(dim=-1)
            floor = max(float(size.square().mean().sqrt()), least)
            worst = max(worst, float(((two - one).norm(dim=-1) / size.clamp_min(floor)).max()))
        return worst


def _by_row(*grads: Tensor) -> list[Tensor]:
    return [g.double().flatten(0, -2) if g.dim() > 1 else g.double()[None] for g in grads]


def run_step(model: nn.Module, batch: dict[str, Any], engine: Any = None) -> Step:
    """Run one step; ``engine`` None: plain."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward() if engine is None else engine.backward(loss)
    return _finish(model, loss)


def _finish(model: nn.Module, loss: Tensor) -> Step:
    grads = tuple(torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in model.parameters())
    model.zero_grad(set_to_none=True)
    return Step(float(loss.detach()), grads)


def run_alone(model: Any, batch: dict[str, Any]) -> Step:
    """Run every sequence of a batch by itself, without padding and masks, and add up."""
    ids, labels = batch["input_ids"], batch["labels"]
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    given = batch.get("position_ids")
    given = None if given is None else given.expand(ids.shape)  # one row may stand for all
    target = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], 1)
    total = torch.zeros(())
    for row in range(len(ids)):
        columns = real[row].nonzero()[:, 0]
        cuts = []
        if given is not None and "attention_mask" not in batch:
            cuts = ((given[row].diff() != 1).nonzero()[:, 0] + 1).tolist()
        for part in columns.tensor_split(cuts):
            if not len(part) or not (target[row, part] != IGNORED).any():
                continue
            position = {} if given is None else {"position_ids": given[row, part][None]}
            logits = model(input_ids=ids[row, part][None], use_cache=False, **position).logits[0]
            total = total + nn.functional.cross_entropy(
                logits.float(), target[row, part], ignore_index=IGNORED, reduction="sum"
            )
    number = batch.get("num_items_in_batch", (target != IGNORED).sum())
    model.zero_grad(set_to_none=True)
    loss = total / number
    if loss.requires_grad:
        loss.backward()
    return _finish(model, loss)


class Judge:
    """Judges batches of one model in sequences: each sequence is a run of its own, with ``verify: first``."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model = model if dtype == torch.float32 else deepcopy(model).to(dtype)
        # In float32, with the weights of the model that is judged: the gradient of a single number, such as a slope of
        # xIELU, is a sum that nearly cancels, and rounded weights alone make it another one.
        self.exact = model if dtype == torch.float32 else deepcopy(self.model).float()
        self.count = Count()

    def judge(self, seed: int, length: int) -> None:
        """Draw a sequence of batches, and judge all."""
        rng = random.Random(seed)
        facts, size = draw_facts(rng), (rng.randint(2, 4), rng.randint(*LENGTHS))
        with sbp.attach(self.model, sbp.make_policy("lossless")) as engine:
            (extension,) = engine.extensions
            for number in range(length):
                if number:
                    facts = change_facts(facts, rng)
                batch = make_batch(facts, rng, size)
                self._judge_one(engine, extension, batch, f"{type(self.model).__name__} {seed}.{number}: {facts}")
                if extension.failure:
                    break

    def _judge_one(self, engine: Any, extension: Any, batch: dict[str, Any], name: str) -> None:
        count, counts = self.count, extension.counts
        try:
            with engine.disabled():
                plain = run_step(self.model, batch)
        except Exception:  # whatever a model thinks of such a batch
            count.unjudged += 1
            return
        expected = plain if self.model is self.exact else run_step(self.exact, batch)
        if not (plain.is_finite and expected.is_finite):
            count.unjudged += 1
            return
        before, refused = counts.packed, counts.refused.total()
        try:
            got = run_step(self.model, batch, engine)
        except UnsupportedError as error:
            count.refused += 1
            count.reasons[str(error)] += 1
            return
        is_packed = counts.packed > before
        error = self._error(plain, expected, got, batch, engine, is_packed=is_packed)
        if error:
            count.wrong += 1
            count.cases.append(f"{name}; {error}; {extension.failure or counts.describe()}")
        elif is_packed:
            count.packed += 1
        elif extension.failure:
            count.noticed += 1
            count.reasons[extension.failure] += 1
            count.seen.append(f"{name}; {extension.failure}")
        elif counts.refused.total() > refused:
            count.refused += 1
            count.reasons.update(dict.fromkeys(counts.refused, 1))
        else:
            count.plain += 1

    def _error(
        self, plain: Step, expected: Step, got: Step, batch: dict[str, Any], engine: Any, *, is_packed: bool
    ) -> str:
        """Return what is wrong with a step; empty: nothing."""
        error = plain.error(got)
        if not is_packed:  # the same operations
            return f"plain {error:.1e}" if error > WRONG else ""
        if self.model is not self.exact:
            return self._error_of_rounded(plain, expected, got, batch)
        return "" if error <= WRONG else self._beside_alone(self.exact, got, batch, error, engine)

    def _error_of_rounded(self, plain: Step, expected: Step, got: Step, batch: dict[str, Any]) -> str:
        """Judge the same rows in float32, and the rounding beside that of the plain step."""
        with sbp.attach(self.exact, sbp.make_policy("lossless", verify="never")) as engine:
            exact = run_step(self.exact, batch, engine)
            error = expected.error(exact)
            if error > WRONG:
                return self._beside_alone(self.exact, exact, batch, error, engine)
        rounding, error = expected.error(plain), expected.error(got)
        if error <= MOST_TIMES * rounding + ROUNDING:
            return ""
        losses = ", ".join(f"{step.loss:.3e}" for step in (got, plain, expected))
        return f"rounded {error:.1e}, plain {rounding:.1e} (losses {losses})"

    def _beside_alone(self, model: Any, got: Step, batch: dict[str, Any], error: float, engine: Any) -> str:
        with engine.disabled():
            try:
                alone = run_alone(model, batch).error(got)
            except Exception:  # then the plain step is the judge
                alone = float("inf")
        if alone > WRONG:
            return f"{error:.1e} from plain, {alone:.1e} from alone"
        self.count.alone += 1
        return ""


def every_family() -> Iterator[tuple[str, Any]]:
    """Every tiny decoder with enlarged weights that packing takes, and those whose masks or rotary embeddings differ
    within a few positions: defaults of a class begin to at thousands.
    """
    for name, model in chain(every_enlarged_model(), changed_families()):
        try:
            model.set_attn_implementation("sdpa")
            with sbp.attach(model, "lossless"):
                pass
        except Exception:  # refused by name, as tests/backward/packing/test_every_decoder.py shows
            continue
        if hasattr(model, "set_default_language"):  # it has adapters of languages, and no batch says which
            model.set_default_language(model.config.languages[0])
        yield name, model


def changed_families() -> Iterator[tuple[str, Any]]:
    """Yield models with short chunks, short windows, and rotary embeddings that depend on the largest position."""
    rotary = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
    long = rotary | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0]}
    changes: list[tuple[Any, Any, dict[str, Any]]] = [
        (Llama4TextConfig, Llama4ForCausalLM, {"attention_chunk_size": 6, "layer_types": None}),
        (Phi3Config, Phi3ForCausalLM, {"rope_parameters": long, "sliding_window": None}),
        (LlamaConfig, LlamaForCausalLM, {"rope_parameters": rotary | {"rope_type": "dynamic", "factor": 2.0}}),
        (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
        (Gemma3TextConfig, Gemma3ForCausalLM, {"sliding_window": 5}),
    ]
    for config, kind, change in changes:
        model = tiny(config, kind, change)
        if model is None:
            raise AssertionError(f"{kind.__name__} with {change} is not made")
        enlarge(model)
        yield f"{config.__name__} {kind.__name__} {', '.join(change)}", model
