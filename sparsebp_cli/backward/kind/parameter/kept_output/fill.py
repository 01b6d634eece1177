"""The output of the frozen layers for a batch, from cached and computed outputs.

With ``padding: keep``, the layers run on batches. A product of another shape may sum in another order. So a cached
output is reused only after a test showed, on this machine and for this shape, that the bits of an example do not depend
on its neighbours. With ``padding: drop``, each example runs alone, so there are no neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from sparsebp_cli.backward.kind.parameter.kept_output.calls import LayerCalls, find_positions
from sparsebp_cli.backward.kind.parameter.kept_output.form import EncodedOutput, RoundingError, encode
from sparsebp_cli.backward.kind.parameter.kept_output.store import OutputStore
from sparsebp_cli.backward.observe.flops import counting_now
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import KeptOutputs

RECHECK = 64  # the cached batches of one shape with this number, and with 2, 4, ... times it, are computed as well
# Largest relative difference between outputs of examples alone and padded. Rounding is 1e-7 (float32), 5e-3 (bfloat16).
LARGEST = {torch.float32: 1e-4, torch.float64: 1e-10}
LARGEST_OTHER = 0.05
SQUARES = ("attention", "bmm")  # operators whose products grow with the square of the length
Shape = tuple[int, int, int]  # (examples that are computed, examples, positions)


@dataclass(frozen=True)
class FrozenForward:
    """One forward of the frozen layers."""

    calls: LayerCalls
    mask_BT: Tensor | None  # the model's attention mask; None: no padding
    whole_BTD: Tensor | None  # the output, if the layers have run on the whole batch; None: not yet
    context: bytes  # digest of the layers and of how they run
    probes: bool  # whether this is a probe, which caches nothing


@dataclass(frozen=True)
class Filled:
    """The result of a forward."""

    output_BTD: Tensor
    num_known: int  # examples whose cached output was used
    executed_share: float  # executed FLOPs over the FLOPs of the plain forward; more than 1 with comparisons
    left_out: float  # FLOPs of the plain forward that were saved


class Fill(ABC):
    """Returns the output of a batch, and caches new outputs of examples."""

    store: OutputStore
    error: RoundingError
    cost: tuple[float, float] | None  # FLOPs of the layers per position, and per squared position; None: not counted
    notes: dict[str, str]  # notes for the report

    def __init__(self, kept: KeptOutputs, store: OutputStore) -> None:
        self._kept, self.store, self.error = kept, store, RoundingError()
        self.cost, self.notes = None, {}

    def __call__(self, forward: FrozenForward) -> Filled:
        """Return the output of a batch."""
        if not forward.probes:
            self.store.begin(forward.context)
        filled = self.fill(forward)
        if self.store.problem:
            self.notes["kept outputs end"] = f"no more outputs are kept: {self.store.problem}"
        return filled

    @abstractmethod
    def fill(self, forward: FrozenForward) -> Filled:
        """Return the output of a batch. Except in probes, the store has the context of the forward."""

    def run(self, calls: LayerCalls, rows: Sequence[int] | None, *, probes: bool) -> Tensor:
        """Run the layers, and set ``cost`` if a probe counts FLOPs."""
        count = counting_now() if probes else None
        before = Counter() if count is None else Counter(count.by_operator)
        output = calls.compute(rows)
        if count is not None:
            spent = {name: flops - before[name] for name, flops in count.by_operator.items()}
            squares = sum(flops for name, flops in spent.items() if any(part in name for part in SQUARES))
            positions = (calls.num_examples if rows is None else len(rows)) * calls.length
            self.cost = ((sum(spent.values()) - squares) / positions, squares / (positions * calls.length))
        return output

    def price(self, length: int) -> float:
        """Return the FLOPs of the layers for one example; 0 if not counted yet."""
        return 0.0 if self.cost is None else length * (self.cost[0] + length * self.cost[1])

    def keep(self, key: bytes, encoded: EncodedOutput, output_TD: Tensor) -> None:
        """Cache a new output, and measure its error."""
        if self.store.put(key, encoded) and self._kept.form != "exact":
            self.error.add(output_TD, encoded.decode())


@dataclass
class _Batch:
    """The state of a batch in the frozen layers."""

    forward: FrozenForward
    known: Mapping[int, Tensor]
    missing: Sequence[int]
    # Encoded and original outputs of computed rows, if encoding rounds: the first visit uses rounded values, too.
    encoded: dict[int, tuple[EncodedOutput, Tensor]] = field(default_factory=dict)
    num_executed: int = 0  # runs of examples through the layers, including repeated ones
    is_whole: bool = False  # whether all examples ran together, so that the result is the plain one

    @property
    def shape(self) -> Shape:
        return len(self.missing), self.forward.calls.num_examples, self.forward.calls.length


@final
class PaddedFill(Fill):
    """Runs the layers on padded batches. The result is bit-identical to training without a cache."""

    def __init__(self, kept: KeptOutputs, store: OutputStore) -> None:
        super().__init__(kept, store)
        self._even: dict[Shape, bool] = {}  # whether outputs of this shape are independent of neighbours
        self._num_used: Counter[Shape] = Counter()
        self._context = b""  # the context of these tests

    def fill(self, forward: FrozenForward) -> Filled:
        if forward.context != self._context:
            self._context, self._even = forward.context, {}
            self._num_used.clear()
        calls = forward.calls
        keys = calls.keys(forward.context)
        found = [self.store.get(key) for key in keys]
        known = {row: one.decode() for row, one in enumerate(found) if one is not None}
        batch = _Batch(forward, known, [row for row in range(calls.num_examples) if row not in known])
        output = self._compute(batch)
        if not forward.probes and self._even.get((0, *batch.shape[1:]), True):
            for row in batch.missing:
                encoded, given = batch.encoded.get(row) or (encode(output[row], "exact"), output[row])
                self.keep(keys[row], encoded, given)
        executed = batch.num_executed / calls.num_examples
        left_out = (calls.num_examples - batch.num_executed) * self.price(calls.length)
        return Filled(output, 0 if batch.is_whole else len(known), executed, left_out)

    def _compute(self, batch: _Batch) -> Tensor:
        """Return the outputs. Reuse a cached one only where reuse was verified to be bit-identical."""
        shape, probes = batch.shape, batch.forward.probes
        if shape[0] == shape[1]:
            whole = self._run(batch, None)
            nobody_missing = (0, *shape[1:])
            if not probes and nobody_missing not in self._even and not self.store.problem:
                self._even[nobody_missing] = self._is_even(batch, whole)
            return self._round(batch, whole, batch.missing)
        count = self._num_used[shape] + 1
        is_due = count >= RECHECK and not count & (count - 1)
        if self._even.get(shape) and (probes or not is_due):
            if not probes:
                self._num_used[shape] = count
            return self._join(batch)
        result = self._round(batch, self._run(batch, None), range(shape[1]))
        if not probes and self._even.get(shape, True):
            self._even[shape] = torch.equal(self._join(batch), result)
            self._num_used[shape] = count
            if not self._even[shape]:
                self._tell_uneven(shape)
        return result

    def _run(self, batch: _Batch, rows: Sequence[int] | None) -> Tensor:
        forward = batch.forward
        batch.num_executed += forward.calls.num_examples if rows is None else len(rows)
        batch.is_whole |= rows is None
        if rows is None and forward.whole_BTD is not None:
            return forward.whole_BTD
        return self.run(forward.calls, rows, probes=forward.probes)

    def _is_even(self, batch: _Batch, whole: Tensor) -> bool:
        """Return whether the outputs are bit-identical with the examples in another order."""
        if batch.shape[1] == 1:
            return True
        order = [*range(1, batch.shape[1]), 0]
        is_even = torch.equal(self._run(batch, order), whole[torch.tensor(order, device=whole.device)])
        if not is_even:
            self._tell_uneven((0, *batch.shape[1:]))
        return is_even

    def _join(self, batch: _Batch) -> Tensor:
        """Return cached and computed outputs together, in the order of the batch."""
        device = batch.forward.calls.hidden_BTD.device
        rows = {row: output.to(device) for row, output in batch.known.items()}
        if batch.missing:
            computed = self._round(batch, self._run(batch, batch.missing), batch.missing)
            rows |= dict(zip(batch.missing, computed, strict=True))
        return torch.stack([rows[row] for row in range(batch.shape[1])])

    def _round(self, batch: _Batch, output_BTD: Tensor, rows: Sequence[int]) -> Tensor:
        """Return outputs of some rows after encoding and decoding."""
        if self._kept.form == "exact":
            return output_BTD
        for row, output_TD in zip(rows, output_BTD, strict=True):
            batch.encoded[row] = encode(output_TD, self._kept.form), output_TD
        return torch.stack([batch.encoded[row][0].decode() for row in rows]).to(output_BTD.device)

    def _tell_uneven(self, shape: Shape) -> None:
        missing, examples, length = shape
        what = f"{examples - missing} of {examples} examples of {length} positions"
        self.notes[f"kept outputs of {shape}"] = (
            f"outputs of frozen layers are computed for batches with {what} known: on this machine their bits depend "
            "on the other examples"
        )


@final
class LoneFill(Fill):
    """Runs each example alone, without padding. The output is 0 at positions of padding.

    An output depends only on its example, so it does not matter which other examples are cached.
    """

    def __init__(self, kept: KeptOutputs, store: OutputStore) -> None:
        super().__init__(kept, store)
        self._longest = 0  # length of the longest batch that was compared with the padded forward

    def fill(self, forward: FrozenForward) -> Filled:
        calls, probes = forward.calls, forward.probes
        places = find_positions(forward.mask_BT, calls)
        output_BTD, executed, num_known, plain = None, 0.0, 0, forward.whole_BTD
        for row, positions in enumerate(places):
            lone = calls.cut(row, positions)
            (key,) = lone.keys(forward.context)
            found = self.store.get(key)
            num_known += found is not None
            if found is None:
                computed_TD = self.run(lone, None, probes=probes)[0]
                found = encode(computed_TD, self._kept.form)
                executed += self._weigh(len(positions))
                if not probes:
                    self.keep(key, found, computed_TD)
            kept_TD = found.decode().to(calls.hidden_BTD.device)
            if output_BTD is None:
                output_BTD = kept_TD.new_zeros(*calls.hidden_BTD.shape[:2], kept_TD.shape[-1])
            output_BTD[row, positions.start : positions.stop] = kept_TD
        assert output_BTD is not None
        if not probes and calls.length > self._longest:
            if plain is None:
                plain = self.run(calls, None, probes=probes)
            self._compare(output_BTD, plain, places)
            self._longest = calls.length
        if plain is not None:
            executed += calls.num_examples * self._weigh(calls.length)
        whole = calls.num_examples * self._weigh(calls.length)
        left_out = (whole - executed) if self.cost is not None else 0.0
        return Filled(output_BTD, num_known, executed / whole, left_out)

    def _weigh(self, length: int) -> float:
        """Return the FLOPs of one example, or its number of positions if not counted yet."""
        return self.price(length) or float(length)

    def _compare(self, output_BTD: Tensor, plain_BTD: Tensor, places: Sequence[range]) -> None:
        """Refuse layers whose output for an example alone differs, such as experts of limited capacity."""
        error = norm = 0.0
        for row, positions in enumerate(places):
            span = slice(positions.start, positions.stop)
            plain_TD = plain_BTD[row, span].double()
            error += float((output_BTD[row, span].double() - plain_TD).square().sum())
            norm += float(plain_TD.square().sum())
        relative = (error / norm) ** 0.5 if norm else 0.0
        rounding = {"exact": 0.0, "bfloat16": 0.01, "int8": 0.5}[self._kept.form]
        self.notes["kept outputs alone"] = (
            f"outputs of examples alone differ from those in padded batches by {relative:.1e} of their norm"
        )
        if relative > LARGEST.get(plain_BTD.dtype, LARGEST_OTHER) + rounding:
            raise UnsupportedError(
                f"cache_padding: drop: the output of the frozen layers for an example alone differs by "
                f"{relative:.1e} of its norm; use cache_padding: keep"
            )
