"""Check a batch's isolation: do its examples influence each other?

There are two tests, since neither finds everything. The first compares the outputs of each example in the batch with
those of the example alone. It also finds wrong positions and masks, but only above rounding error. The second tests
whether the gradient of an example's outputs reaches another example's embeddings, for all examples at once. With a
factor c_i on the outputs of example i, the gradient for the embeddings of example j, divided by c_j, is

    d h_j / d e_j  +  sum over i of (c_i / c_j) d h_i / d e_j,

which does not depend on the factors if no other example reads j. The factors are signs and powers of two, which
floating point multiplies exactly. Without a leak, passes with other factors therefore agree bit for bit in every dtype,
except with kernels of varying summation order. Every two examples have different factors in one of the passes, so no
pair is missed. Several pairs could cancel only in all numbers of a random projection at once.

Shape letters: B rows, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_audit.isolation.boundaries import find_examples
from sparsebp_audit.isolation.embeddings import Embeddings
from sparsebp_audit.isolation.mend import find_cause, find_purpose
from sparsebp_audit.isolation.part import find_first_module
from sparsebp_audit.report.isolation import BatchJudgement, MixedPair
from sparsebp_cli.backward.isolation.alone import relative_difference
from sparsebp_cli.backward.isolation.examples import Examples, NotAlone
from sparsebp_cli.backward.isolation.output import ExampleOutputs
from sparsebp_cli.backward.isolation.run import undisturbed
from sparsebp_cli.backward.observe.internals import is_batch_norm
from sparsebp_cli.backward.patch.rng import capture_generators

# Largest effect of rounding, relative to the 2-norm, by the coarsest dtype in the computation: of an output, and of the
# gradient between passes whose factors are powers of two.
OUTPUT_LIMITS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
LEAK_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}
# Exact in every dtype: a clean batch gives equal bits, so the limit need not allow for rounding. See decision 20.
FACTORS = tuple(sign * 2.0**power for power in range(-4, 4) for sign in (1, -1))
CLEAR = 30  # times the limit: above it the model's rounding need not be measured
MOST_COST = 9  # thirds of a plain step: the search for pairs stops here; each reading example takes one backward


def judge_batch(model: nn.Module, inputs: dict[str, Any]) -> BatchJudgement:
    """Check whether each example of a batch is computed as if it were alone.

    The model is called several times, without dropout. Parameters, their gradients, buffers and random generators are
    the same afterwards.

    Args:
        model: Any model that is called with its batch by name, in training mode.
        inputs: The arguments of its forward by name. Examples are its rows, or sequences in them that
            ``cu_seq_lens_q``, ``seq_idx``, numbers in ``attention_mask`` or restarts of ``position_ids`` show.

    Returns:
        The judgement; it is ``unjudged``, with a reason, if examples cannot be distinguished or run alone.
    """
    kind = type(_unwrapped(model)).__name__
    pad = getattr(getattr(_unwrapped(model), "config", None), "pad_token_id", None)
    # All positions are judged, even if the script keeps only some.
    given = {name: value for name, value in inputs.items() if name != "logits_to_keep"}
    try:
        examples = find_examples(given, pad if isinstance(pad, int) else None)
        norm = next((n for n, module in model.named_modules() if is_batch_norm(module) and module.training), None)
        with undisturbed(model), torch.enable_grad():
            found = _Trial(model, examples, ExampleOutputs(model, examples), kind).judge()
        if norm is not None and found.verdict == "alone":
            return replace(found, verdict="purpose", reason=find_purpose(model, norm))
        return found
    except NotAlone as error:
        return BatchJudgement(kind, "unjudged", reason=str(error))
    except Exception as error:  # the training must continue, even if the model refuses a single example
        line = (str(error).strip().splitlines() or [""])[0]
        return BatchJudgement(kind, "unjudged", reason=f"{type(error).__name__}: {line}"[:200])


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers, such as DistributedDataParallel's or a compiled one's."""
    while True:
        inner = next((v for k in ("module", "_orig_mod") if isinstance(v := model._modules.get(k), nn.Module)), None)  # noqa: SLF001
        if inner is None:
            return model
        model = inner


@dataclass
class _Trial:
    """The judgement of one batch."""

    model: nn.Module
    examples: Examples
    outputs: ExampleOutputs
    kind: str
    cost: float = 0.0  # positions that passes processed
    alone: list[Tensor] = field(default_factory=list)
    is_random: bool = False  # whether the model draws random numbers, beyond dropout

    def judge(self) -> BatchJudgement:
        examples, count = self.examples, len(self.examples.found)
        rows, width = examples.size
        outputs = self.outputs
        embeddings = Embeddings(self.model, examples.inputs, examples.size)
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        before = capture_generators(device)
        with embeddings.taken():
            values = outputs.run(embeddings.open_inputs())
        after = capture_generators(device)
        # A random forward, such as a router that draws experts, differs each time; its graph can still be tested.
        self.is_random = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True) if a is not None)  # type: ignore[arg-type]
        outputs.choose(values)
        output = outputs.take_batch(values)
        self.cost += self.size + min(len(example.columns) for example in examples.found)
        self._run_alone()
        found = BatchJudgement(
            model=self.kind,
            verdict="alone",
            examples=count,
            rows=rows,
            positions=rows * width,
            told_by=examples.told_by,
            difference_limit=self._limit(OUTPUT_LIMITS, output),
            leak_limit=self._limit(LEAK_LIMITS, output),
        )
        if not embeddings.leaves or not output.requires_grad:
            raise NotAlone("no gradient flows from the model's outputs to embeddings or inputs")
        differences = self.compare(output)
        leak = self._find_leak(output, embeddings.leaves) if count > 1 else 0.0
        found = replace(found, difference=max(differences), leak=leak)
        if max(differences) > found.difference_limit or leak > found.leak_limit:
            found = self._explain(found, output, differences, embeddings.leaves)
        return replace(found, cost_steps=self.cost / (3 * self.size))

    def run(self, inputs: dict[str, Any]) -> Tensor:
        """Run the batch or a variant of it, and return the judged values."""
        self.cost += self.size
        return self.outputs.take_batch(self.outputs.run(inputs))

    def compare(self, output: Tensor) -> list[float]:
        """Return the relative difference, by 2-norm, of each example's outputs in the batch and alone."""
        return [
            relative_difference(self.outputs.part(output.detach(), number), alone.to(output.device))
            for number, alone in enumerate(self.alone)
        ]

    @property
    def size(self) -> int:
        """Positions of the batch."""
        return self.examples.size[0] * self.examples.size[1]

    def _run_alone(self) -> None:
        with torch.no_grad():
            for number, example in enumerate(self.examples.found):
                self.alone.append(self.outputs.of_one(number))
                self.cost += len(example.columns)

    def _limit(self, limits: dict[torch.dtype, float], output: Tensor) -> float:
        kinds = {parameter.dtype for parameter in self.model.parameters()} | {output.dtype}
        device = output.device.type
        if torch.is_autocast_enabled(device):
            kinds.add(torch.get_autocast_dtype(device))
        return max(limits[kind] for kind in kinds if kind in limits)

    def _find_leak(self, output: Tensor, leaves: list[Tensor]) -> float:
        """Return the largest relative change of a gradient under other factors for other examples' outputs."""
        count, base = len(self.examples.found), len(FACTORS)
        # A separate generator, because the training's generator must not advance.
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        plain = self._gradients(output, leaves, direction, [1.0] * count)
        scale = max(_norm(part) for part in plain)
        worst, place = 0.0, 1
        while place < count or place == 1:  # numbers in base 16, digit by digit: every two differ in one digit
            factors = [FACTORS[(number // place) % base] for number in range(count)]
            scaled = self._gradients(output, leaves, direction, factors)
            for number, factor in enumerate(factors):
                change = _norm([b / factor - a for a, b in zip(plain[number], scaled[number], strict=True)])
                # An example with hardly any gradient has no meaningful relative change.
                worst = max(worst, change / max(_norm(plain[number]), 1e-3 * scale, 1e-30))
            place *= base
        return worst

    def _gradients(
        self, output: Tensor, leaves: list[Tensor], direction: Tensor, factors: list[float]
    ) -> list[list[Tensor]]:
        """Return the gradient for each example's embeddings; ``factors`` are those of the examples' outputs."""
        weighted = torch.zeros_like(direction)
        for number, factor in enumerate(factors):
            if factor:
                place = self.outputs.place(number)
                weighted[place] = direction[place] * factor
        self.cost += self.size
        made = torch.autograd.grad(output, leaves, weighted, retain_graph=True, allow_unused=True)
        grads = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(made, leaves, strict=True)]
        return [[self._input_part(grad, number) for grad in grads] for number in range(len(self.examples.found))]

    def _input_part(self, leaf: Tensor, number: int) -> Tensor:
        """Return the part of an input, or of its gradient, that belongs to an example."""
        example, width = self.examples.found[number], self.examples.size[1]
        if leaf.dim() > 1 and leaf.shape[1] >= width and (self.examples.several or leaf.shape[1] == width):
            return leaf[:, -width:][example.row, example.columns.to(leaf.device)]
        return leaf[example.row]

    def _explain(
        self, found: BatchJudgement, output: Tensor, differences: list[float], leaves: list[Tensor]
    ) -> BatchJudgement:
        """Add to a judgement where examples differ, which reads which, why, and what mends it."""
        order = sorted(range(len(differences)), key=lambda number: -differences[number])
        limit = found.difference_limit
        if differences[order[0]] < CLEAR * limit:
            limit = max(limit, 4 * self._measure_rounding(order[0]))
        affected = tuple(number for number in order if differences[number] > limit)
        found = replace(found, difference_limit=limit)
        if not affected and found.leak <= found.leak_limit:
            return found
        if self.is_random and found.leak <= found.leak_limit:
            raise NotAlone("the forward draws random numbers besides dropout, so two forwards cannot be compared")
        first = find_first_module(self.model, self.examples, self.outputs, order[0], limit)
        self.cost += self.size + len(self.examples.found[order[0]].columns)
        if relative_difference(first.output, output.detach()) > limit and found.leak <= found.leak_limit:
            raise NotAlone("two forwards of the same batch differ")
        found = replace(found, verdict="mixed", module=first.name, module_class=first.kind)
        purpose = find_purpose(self.model, first.name)
        if purpose:
            found = replace(found, verdict="purpose", reason=purpose)
        else:
            found = find_cause(
                found, self.model, self.examples, self._mends(limit), lambda: self._reads_others(order[0], limit)
            )
        if found.leak > found.leak_limit:
            found = replace(found, pairs=self._find_pairs(output, leaves, affected or tuple(order), found.leak_limit))
        affected = affected or tuple(sorted({pair.target for pair in found.pairs}))
        return replace(found, affected=affected, differences=tuple(differences[number] for number in affected))

    def _mends(self, limit: float) -> Callable[[dict[str, Any]], bool]:
        def mends(inputs: dict[str, Any]) -> bool:
            """Return whether the examples are isolated with other arguments."""
            try:
                with torch.no_grad():
                    return max(self.compare(self.run(inputs))) <= limit
            except Exception:  # a model may refuse another model's arguments
                return False

        return mends

    def _reads_others(self, number: int, limit: float) -> bool:
        """Return whether the outputs of an example change when copies of it, or the others in another order, replace
        the others."""
        example, changed = self.examples.found[number], list[dict[str, Any]]()
        for name in ("input_ids", "inputs_embeds", "pixel_values"):
            value = self.examples.inputs.get(name)
            if not isinstance(value, Tensor) or len(value) != self.examples.size[0]:
                continue
            place = (example.row, example.columns.to(value.device)) if self.examples.several else (example.row,)
            own = value[place]
            repeated = own[torch.arange(value.shape[1], device=own.device) % len(own)]
            for other in (repeated.expand_as(value).clone(), value.flip(0).roll(1, 1)):
                other[place] = own
                changed.append(dict(self.examples.inputs) | {name: other})
        try:
            with torch.no_grad():
                plain = self.outputs.part(self.run(dict(self.examples.inputs)), number)
                found = [self.outputs.part(self.run(inputs), number) for inputs in changed]
            return any(relative_difference(one, plain) > limit for one in found)
        except Exception:  # a model may refuse moved tokens
            return False

    def _measure_rounding(self, number: int) -> float:
        """Return how much the outputs of an example alone change when the batch contains its row twice."""
        with torch.no_grad():
            twice = self._run_twice(number)
        self.cost += 2 * len(self.examples.found[number].columns)
        return relative_difference(twice, self.alone[number]) if twice is not None else 0.0

    def _run_twice(self, number: int) -> Tensor | None:
        """Run two copies of an example as two rows, and return the values of the second; None if this fails."""
        try:
            twice = {
                name: torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() else value
                for name, value in self.examples.alone(number).items()
            }
            values = self.outputs.run(twice).items()
            return self.outputs.take_alone({name: value[len(value) // 2 :] for name, value in values})
        except Exception:  # the model may support only one row at a time
            return None

    def _find_pairs(
        self, output: Tensor, leaves: list[Tensor], targets: tuple[int, ...], limit: float
    ) -> tuple[MixedPair, ...]:
        """Return which examples the outputs of some examples read, with one backward each."""
        count = len(self.examples.found)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        pairs: list[MixedPair] = []
        for target in targets:
            if pairs and self.cost + self.size > MOST_COST * self.size:
                break
            norms = [
                _norm(part)
                for part in self._gradients(output, leaves, direction, [float(i == target) for i in range(count)])
            ]
            for source, norm in enumerate(norms):
                if source != target and norm > limit * norms[target]:
                    pairs.append(MixedPair(source, target, norm / max(norms[target], 1e-30)))
        return tuple(sorted(pairs, key=lambda pair: -pair.share))


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()) if tensors else 0.0
