"""Adds noise of three shapes to dense's gradient at equal variance by curvature, and trains with it.

The protocol is docs/results/cause/PROTOCOL.md.

    python benchmarks/cause.py --measure     # amplitudes and estimates of each task; measured.json
    python benchmarks/cause.py --run         # trains what is missing, and goes on from there; TASK.csv
    python benchmarks/cause.py               # judges the runs; summary.json
    python benchmarks/cause.py --tiny        # one round of few steps on a task that does not count; prints alone

The shapes: *isotropic* has the same variance in all directions of AdamW's metric as it is when noise begins, *batch* is
the difference of the gradients of other examples, *projection* is what a random projection of the inputs of each linear
makes of the batch's gradient. Trained are the weights of the linears inside the blocks, where policies choose. All arms
of a seed begin with the same dense steps. Noise is added to both of AdamW's moments, to the first or to the second.
"""

from __future__ import annotations

import argparse
import copy
import csv
import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import torch  # noqa: E402
from cause_result import BATCH, BATCH_LEVELS, BATCHES, LEVELS, SHAPES, SHARES, judge  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402

import sparsebp_cli as sbp  # noqa: E402
from sparsebp_cli.source.bundled import austen_llama, is_held_out, load_austen, load_cmudict, load_python_docs  # noqa: E402
from sparsebp_lab.worth.curvature import Curvature  # noqa: E402
from sparsebp_lab.worth.squares import WorthMetric, inner  # noqa: E402
from sparsebp_lab.worth.step_length import StepLength, share_of_batch  # noqa: E402

FOLDER = ROOT / "docs" / "results" / "cause"
LENGTH, RATE, BETAS = 24, 3e-3, (0.9, 0.999)
PRETRAINED, PRETRAINED_RATE = 150, 3e-3  # steps of 32 examples before all tasks
FIRST, LAST = 10, 50  # steps of dense that all arms share, and of a whole training
CHECKPOINTS = (10, 20, 30, 42)  # steps of dense's training at which noise is measured
FEW = 4  # examples of each of the two batches whose difference is the batch's noise
PAIRS, DRAWS, CURVED = 8, 3, 64  # pairs of batches; draws of a noise; examples of the curvature
EVALUATED = 256  # examples
ROUNDS = 5
CALIBRATION_SEED, EXTRA = 900, 100  # seeds of the measurement, and of dense's second run of a round
METHODS: dict[str, dict[str, Any]] = {
    "random-rows-25": {"name": "random", "keep": 0.25, "along": "rows", "weighted": True},
    "crs-10": {"name": "crs", "keep": 0.1},
    "wta-crs-10": {"name": "wta-crs", "keep": 0.1},
    "mvue-1-4": {"name": "mvue", "kept": 1, "group": 4},
    "dither-2": {"name": "dither", "scale": 2.0},
    "gact-2": {"name": "gact", "bits": 2},
    "sketch-20": {"name": "sketch", "keep": 0.2},
    "compact": {"name": "compact"},
}
Gradients = dict[str, Tensor]
Noise = Callable[[Gradients], Gradients]  # of the gradient of a step's batch
Units = Mapping[str, Sequence[tuple[int, float]]]  # by shape: checkpoints with squares of amplitudes


class AdamW(torch.optim.Optimizer):
    """AdamW without decay, whose second moment can be that of other gradients than its step's."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights.values(), {})
        self.weights, self.steps = weights, 0
        for weight in weights.values():
            self.state[weight] = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def update(self, gradients: Gradients, squared: Gradients, rate: float) -> None:
        """Make a step along some gradients, with the second moment of others."""
        self.steps += 1
        ones = [1.0 - beta**self.steps for beta in BETAS]
        for name, weight in self.weights.items():
            mean, square = self.state[weight]["exp_avg"], self.state[weight]["exp_avg_sq"]
            mean.lerp_(gradients[name], 1.0 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(squared[name], squared[name], value=1.0 - BETAS[1])
            weight.addcdiv_(mean, (square / ones[1]).sqrt_().add_(1e-8), value=-rate / ones[0])

    def roots(self) -> Gradients:
        """Return what a gradient is divided by."""
        one = 1.0 - BETAS[1] ** self.steps
        return {name: (self.state[w]["exp_avg_sq"] / one).sqrt().add(1e-8) for name, w in self.weights.items()}


@dataclass(frozen=True)
class Task:
    """Examples of equal length, (examples, LENGTH)."""

    name: str
    train: Tensor
    validation: Tensor

    @classmethod
    @cache
    def load(cls, name: str) -> Task:
        """Return a task by its name."""
        splits = TASKS[name]()
        tokenizer = AutoTokenizer.from_pretrained(austen_llama())
        cut = {}
        for split, texts in splits.items():
            ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
            cut[split] = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
        draw = torch.Generator().manual_seed(0)
        validation = cut["test"][torch.randperm(len(cut["test"]), generator=draw)[:EVALUATED]]
        return cls(name, cut["train"], validation)

    def order(self, seed: int) -> Tensor:
        """Return the places of the training examples in the order of a seed."""
        return torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))


def read_docs() -> dict[str, list[str]]:
    """Return the texts of Python's documentation."""
    return {split: [row["text"] for row in rows] for split, rows in load_python_docs().items()}


def read_names() -> dict[str, list[str]]:
    """Return names of Unicode's characters in small letters, twelve a text, without numbered series."""
    numbered = ("CJK", "HANGUL SYL", "TANGUT", "NUSHU", "KHITAN", "EGYPTIAN", "ANATOLIAN", "VARIATION", "CUNEIFORM")
    names = {unicodedata.name(chr(code), "") for code in range(0x110000)}
    kept = sorted(n.lower() for n in names if n and not n.startswith(numbered))
    kept.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    split: dict[str, list[str]] = {"train": [], "test": []}
    for name in kept:
        split["test" if is_held_out(name) else "train"].append(name)
    return {key: ["\n".join(names[n : n + 12]) for n in range(0, len(names), 12)] for key, names in split.items()}


def read_sounds() -> dict[str, list[str]]:
    """Return words and their sounds: the task for trying this script, which does not count."""
    rows = load_cmudict()
    return {split: [row["prompt"] + row["completion"] for row in found[:4000]] for split, found in rows.items()}


def read_novel() -> dict[str, list[str]]:
    """Return the novels whose first one the model learns before all tasks."""
    return {split: [row["text"] for row in rows] for split, rows in load_austen().items()}


TASKS = {"novel": read_novel, "far": read_docs, "names": read_names, "sounds": read_sounds}
COUNTED = ("far", "names")


@cache
def make_model() -> PreTrainedModel:
    """Return a small llama after dense training on a novel, the same in each process."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.from_pretrained(austen_llama())
    config.update(shape | {"num_key_value_heads": 4, "head_dim": 16})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINED_RATE, weight_decay=0.0)
    examples = Task.load("novel")
    order = examples.order(0)
    for number in range(PRETRAINED):
        ids = examples.train[order[number * 2 * BATCH : (number + 1) * 2 * BATCH]]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Training:
    """A model in the middle of a training on one task."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.order = task, seed, task.order(seed)
        model = copy.deepcopy(make_model())
        self.model: PreTrainedModel = model.train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("_proj.weight"))
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = AdamW(self.weights)

    def batch(self, number: int, size: int = BATCH) -> Tensor:
        """Return the first examples of a step's batch."""
        return self.task.train[self.order[number * BATCH : number * BATCH + size]]

    def others(self, number: int, size: int) -> Tensor:
        """Return examples from the end of the order, which no step of this training sees."""
        return self.task.train[self.order[len(self.order) - (number + 1) * size : len(self.order) - number * size]]

    def gradient(self, examples: Tensor, engine: sbp.Engine | None = None) -> Gradients:
        """Return the gradient of the mean loss, dense or by what is attached."""
        for weight in self.weights.values():
            weight.grad = None
        loss = self.model(input_ids=examples, labels=examples).loss
        (engine.backward if engine is not None else torch.Tensor.backward)(loss)
        return {n: torch.zeros_like(w) if w.grad is None else w.grad.detach() for n, w in self.weights.items()}

    def step(
        self,
        size: int = BATCH,
        noise: Noise | None = None,
        *,
        engine: sbp.Engine | None = None,
        seen_by: str = "",
        share: float = 1.0,
    ) -> None:
        """Make a step: dense with the first examples of the batch, or with what makes its gradient another. Noise is
        seen by both of the optimizer's moments, by the first, or by the second; ``share`` is that of the rate."""
        number = self.optimizer.steps
        dense = self.gradient(self.batch(number, size), engine)
        noisy = dense if noise is None else noise(dense)
        rate = RATE * share * min(1.0, (number + 1) / FIRST)
        first, second = dense if seen_by == "second" else noisy, dense if seen_by == "first" else noisy
        self.optimizer.update(first, second, rate)

    def loss(self) -> float:
        """Return the mean validation loss."""
        self.model.eval()
        with torch.no_grad():
            found = [self.model(input_ids=ids, labels=ids).loss.item() for ids in self.task.validation.split(32)]
        self.model.train()
        return fmean(found)

    def save(self) -> dict[str, Any]:
        """Return a copy of all that a step changes."""
        state = [{key: t.clone() for key, t in self.optimizer.state[w].items()} for w in self.weights.values()]
        return {
            "weights": [w.detach().clone() for w in self.weights.values()],
            "state": state,
            "steps": self.optimizer.steps,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go back to a copy."""
        with torch.no_grad():
            for weight, value, state in zip(self.weights.values(), saved["weights"], saved["state"], strict=True):
                weight.copy_(value)
                for key, tensor in state.items():
                    self.optimizer.state[weight][key].copy_(tensor)
        self.optimizer.steps = saved["steps"]


def draw_isotropic(roots: Gradients, draw: torch.Generator) -> Gradients:
    """Return numbers with the roots of AdamW's second moments for standard deviations."""
    return {name: torch.randn(root.shape, generator=draw) * root for name, root in roots.items()}


def draw_projection(gradients: Gradients, draw: torch.Generator) -> Gradients:
    """Return g (R R^T / k - 1), with a random matrix R of an eighth of the columns of the gradient."""
    found = {}
    for name, g_OD in gradients.items():
        kept = g_OD.shape[1] // 8
        r_DK = torch.randn(g_OD.shape[1], kept, generator=draw)
        found[name] = (g_OD @ r_DK) @ r_DK.T / kept - g_OD
    return found


def make_noise(training: Training, shape: str, variance: Callable[[], float]) -> Noise:
    """Return what adds noise of a shape; ``variance`` is the square of its amplitude at the step that comes."""
    draw = torch.Generator().manual_seed(1_000_003 + training.seed)
    roots = training.optimizer.roots()

    def add(dense: Gradients) -> Gradients:
        amplitude = math.sqrt(variance())
        if shape == "isotropic":
            error = draw_isotropic(roots, draw)
        elif shape == "projection":
            error = draw_projection(dense, draw)
        else:
            number = 2 * training.optimizer.steps
            one, other = (training.gradient(training.others(n, FEW)) for n in (number, number + 1))
            error = {name: one[name] - other[name] for name in one}
        return {name: g + amplitude * error[name] for name, g in dense.items()}

    return add


def interpolate(points: Sequence[tuple[int, float]], step: int) -> float:
    """Return a positive value between checkpoints, linear in its logarithm; beyond them that of the nearest."""
    before, after = [p for p in points if p[0] <= step], [p for p in points if p[0] >= step]
    (a, low), (b, high) = (before or after[:1])[-1], (after or before[-1:])[0]
    return low if a == b else math.exp(math.log(low) + (math.log(high) - math.log(low)) * (step - a) / (b - a))


def list_arms() -> list[str]:
    """Return the names of the arms."""
    noise = [f"batch-{level}" for level in BATCH_LEVELS] + ["batch-1-first", "batch-1-second"]
    for shape in ("isotropic", "projection"):
        noise += [f"{shape}-{level}" for level in LEVELS]
        noise += [f"{shape}-0.1-first", f"{shape}-1-first", f"{shape}-0.1-second"]
    return [*(f"dense-{size}" for size in BATCHES), *(f"slow-{share}" for share in SHARES), *noise, *METHODS]


def train_arm(
    training: Training, arm: str, units: Mapping[str, Sequence[tuple[int, float]]], last: int
) -> dict[str, float]:
    """Train an arm from where the shared steps ended. Return its loss, and the mean logarithm of moments' roots."""
    shape, rest, *_ = [*arm.split("-"), ""]
    size, noise, share = BATCH, None, 1.0
    if shape == "dense":
        size = int(rest)
    elif shape == "slow":
        share = float(rest)
    elif shape in SHAPES:
        level = float(rest)
        unit = units.get(shape, [(0, FEW / (2.0 * BATCH))])
        noise = make_noise(training, shape, lambda: level * interpolate(unit, training.optimizer.steps))
    with ExitStack() as stack:
        engine = None
        if arm in METHODS:
            attached = sbp.attach(training.model, METHODS[arm], exclude=["*lm_head"], seed=training.seed)
            engine = stack.enter_context(attached)
        while share and training.optimizer.steps < last:
            training.step(size, noise, engine=engine, seen_by=arm.rpartition("-")[2], share=share)
    roots = [root.log().double().mean().item() for root in training.optimizer.roots().values()]
    return {"loss": training.loss(), "log_root": fmean(roots)}


@dataclass(frozen=True)
class Size:
    """How much is measured and trained."""

    last: int = LAST
    checkpoints: tuple[int, ...] = CHECKPOINTS
    pairs: int = PAIRS
    draws: int = DRAWS
    rounds: int = ROUNDS
    methods: tuple[str, ...] = tuple(METHODS)


TINY = Size(11, (10,), 2, 2, 1, ("crs-10",))


class Measurement:
    """What the noises are at one step of dense's training."""

    def __init__(self, training: Training, place: int, size: Size, roots: Gradients) -> None:
        self.training, self.size, self.roots = training, size, roots
        self.draw = torch.Generator().manual_seed(place)
        self.metric = WorthMetric(training.optimizer, training.weights)
        self.curved = training.others(0, CURVED)
        self.curvature = Curvature(training.weights, self.metric, training.gradient(self.curved))
        self.first = CURVED // BATCH + place * 2 * PAIRS  # batch, counted from the end of the order
        self.few = (CURVED // BATCH + len(CHECKPOINTS) * 2 * PAIRS) * BATCH // FEW + place * 2 * DRAWS
        numbers = range(self.first, self.first + 2 * size.pairs)
        self.dense = [training.gradient(training.others(number, BATCH)) for number in numbers]

    def measure(self, error: Gradients) -> dict[str, float]:
        """Return the squares of an error: in Adam's metric, and with the curvature between."""
        scaled = [self.metric.scale(name, e) for name, e in error.items()]
        square = sum(inner(s, s) for s in scaled if s is not None)
        return {"plain": square, "curved": self.curvature.square(error, lambda: self.training.gradient(self.curved))}

    def draw_batches(self) -> list[Gradients]:
        """Return the noise of dense's batches."""
        return [half(*self.dense[n : n + 2]) for n in range(0, 2 * self.size.pairs, 2)]

    def draw_shape(self, shape: str, number: int) -> Gradients:
        """Return a noise of a shape without an amplitude."""
        if shape == "isotropic":
            return draw_isotropic(self.roots, self.draw)
        if shape == "projection":
            return draw_projection(self.dense[number], self.draw)
        first = self.few + 2 * number
        one, other = (self.training.gradient(self.training.others(n, FEW)) for n in (first, first + 1))
        return {name: one[name] - other[name] for name in one}

    def draw_method(self, arm: str, number: int) -> tuple[Gradients, float]:
        """Return the noise of a method on a batch, and the square of its bias in Adam's metric."""
        examples, bias = self.training.others(self.first + number, BATCH), 0.0
        with sbp.attach(self.training.model, METHODS[arm], exclude=["*lm_head"], seed=number) as engine:
            one, other = (self.training.gradient(examples, engine) for _ in range(2))
        for name, dense in self.dense[number].items():
            first, second = (self.metric.scale(name, each[name] - dense) for each in (one, other))
            if first is not None and second is not None:
                bias += inner(first, second)
        return half(one, other), bias

    def take(self) -> dict[str, Any]:
        """Return squares of all noises, and the share of the rate that each leaves, as `worth` estimates it."""
        found: dict[str, Any] = {"batch-of-16": [self.measure(error) for error in self.draw_batches()]}
        length = StepLength(self.dense, self.metric, 1.0)
        of_dense = length.shares_of_dense()
        rates = {f"dense-{size}": share_of_batch(of_dense, BATCH / size - 1.0).value for size in BATCHES}
        for shape in SHAPES:
            errors = [self.draw_shape(shape, number) for number in range(self.size.draws)]
            found[shape] = [self.measure(error) for error in errors]
            unit = FEW / (2.0 * BATCH)
            if shape != "batch":
                unit = max(0.0, mean_of(found["batch-of-16"]) / mean_of(found[shape]))
            squares = [{name: e.square() for name, e in error.items()} for error in errors]
            levels = BATCH_LEVELS if shape == "batch" else LEVELS
            rates |= {f"{shape}-{n}": length.share_with(squares, n * unit).value for n in levels}
        for arm in self.size.methods:
            draws = [self.draw_method(arm, number) for number in range(self.size.draws)]
            found[arm] = [self.measure(error) | {"bias": bias} for error, bias in draws]
            rates[arm] = length.share_with([{n: e.square() for n, e in error.items()} for error, _ in draws]).value
        return found | {"rates": rates}


def half(one: Gradients, other: Gradients) -> Gradients:
    """Return a difference of two draws, as large as one draw's error."""
    return {name: (one[name] - other[name]) / math.sqrt(2.0) for name in one}


def mean_of(squares: Sequence[Mapping[str, float]], key: str = "curved") -> float:
    """Return the mean of one kind of square."""
    return fmean(one[key] for one in squares)


def measure_task(task: Task, size: Size) -> dict[str, Any]:
    """Return the noises along dense's training with the seed of the measurement."""
    training = Training(task, CALIBRATION_SEED)
    points: dict[str, Any] = {}
    roots: Gradients = {}
    for place, step in enumerate(size.checkpoints):
        while training.optimizer.steps < step:
            training.step()
        roots = roots or training.optimizer.roots()
        measurement = Measurement(training, place, size, roots)
        points[str(step)] = measurement.take()
        print(task.name, step, flush=True)
    return {"examples": len(task.train), "loss": training.loss(), "points": points}


def find_units(measured: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return by shape and checkpoint the square of the amplitude at which its variance by curvature is that of a batch.
    The batch's own noise needs none. A point where a square is not above zero is left out."""
    units: dict[str, list[tuple[int, float]]] = {shape: [] for shape in SHAPES if shape != "batch"}
    for step, point in measured["points"].items():
        for shape, found in units.items():
            own, between = mean_of(point[shape]), mean_of(point["batch-of-16"])
            if own > 0.0 and between > 0.0:
                found.append((int(step), between / own))
    return units


def run_rounds(
    size: Size, measured: Mapping[str, Any], tasks: Sequence[str], file: Path | None
) -> list[dict[str, Any]]:
    """Train what is missing, one seed of all arms and tasks after the other."""
    rows: list[dict[str, Any]] = []
    if file is not None and file.exists():
        rows = list(csv.DictReader(file.open(encoding="utf-8")))
    done = {(row["task"], row["arm"], int(row["seed"])) for row in rows}
    for number, name in ((number, name) for number in range(size.rounds) for name in tasks):
        task, units = Task.load(name), find_units(measured[name])
        arms = [arm for arm in list_arms() if arm not in METHODS or arm in size.methods]
        for seed in (number, number + EXTRA):
            missing = [a for a in arms if (name, a, seed) not in done and (seed < EXTRA or a.startswith("dense"))]
            if not missing:
                continue
            training = Training(task, seed)
            while training.optimizer.steps < FIRST:
                training.step()
            start = training.save()
            for arm in missing:
                training.load(start)
                row = {"task": name, "arm": arm, "seed": seed, **train_arm(training, arm, units, size.last)}
                rows.append(row)
                print(*row.values(), flush=True)
                if file is not None:
                    append(file, row)
    return rows


def append(file: Path, row: Mapping[str, object]) -> None:
    """Add a line to a table."""
    is_new = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    """Measure, train, or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the noises of each task")
    parser.add_argument("--run", action="store_true", help="train what is missing")
    parser.add_argument("--only", choices=COUNTED, help="with --run: one task")
    parser.add_argument("--tiny", action="store_true", help="few steps of a task that does not count; writes nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.tiny:
        measured = {"sounds": measure_task(Task.load("sounds"), TINY)}
        print(json.dumps(judge(measured, run_rounds(TINY, measured, ["sounds"], None))))
        return
    file = FOLDER / "measured.json"
    if given.measure:
        found = {name: measure_task(Task.load(name), Size()) for name in COUNTED}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    measured = json.loads(file.read_text(encoding="utf-8"))
    if given.run:
        for name in COUNTED if given.only is None else [given.only]:
            run_rounds(Size(), measured, [name], FOLDER / f"{name}.csv")
        return
    rows = [row for name in COUNTED for row in csv.DictReader((FOLDER / f"{name}.csv").open(encoding="utf-8"))]
    (FOLDER / "summary.json").write_text(json.dumps(judge(measured, rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
