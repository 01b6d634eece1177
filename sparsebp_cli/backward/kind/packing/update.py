"""The prefix tree over all micro-batches of one optimizer step.

A segment of the tree that several micro-batches read is *held*. It has one forward, before the first of them, and one
backward, after the last. In between, its keys and values are inputs of each of these micro-batches, and their gradients
add up. If micro-batches come in the order of the tree, memory holds only the segments that the current one reads.

Shape letters: B examples, T positions, N rows of a forward, A rows before them, M rows that are read, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsebp_cli.backward.kind.packing.batch import NeededRows
from sparsebp_cli.backward.kind.packing.groups import Bools, Ints
from sparsebp_cli.backward.kind.packing.layout import (
    MIN_SHARED,
    PackedLayout,
    Segment,
    arrange_segments,
    branch,
)
from sparsebp_cli.backward.observe.internals import version_of
from sparsebp_cli.errors import UnsupportedError, UsageError

KeyValue = tuple[Tensor, Tensor]
Collected = dict[nn.Module, list[KeyValue]]
# Runs the rows of a layout, which attend to the held rows, and returns the input of the head (1, N or M, D).
RunRows = Callable[[PackedLayout, "Sequence[KeptRows]", Collected], Tensor]

COMPARED = ("input_ids", "attention_mask", "position_ids")  # arguments that identify a batch


@dataclass(frozen=True)
class KeptRows:
    """The stored tensors of one held segment."""

    keys: Mapping[nn.Module, KeyValue]  # keys and values (1, H, N, D) of each attention module
    hidden: Tensor | None  # (1, M, D), the head's input for the rows that are read; None: none is read

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        return [t for pair in self.keys.values() for t in pair] + ([] if self.hidden is None else [self.hidden])

    def cut(self) -> KeptRows:
        """Return the same values as leaves of another graph."""

        def leaf(value: Tensor) -> Tensor:
            return value.detach().requires_grad_(value.requires_grad)

        keys = {module: (leaf(key), leaf(value)) for module, (key, value) in self.keys.items()}
        return KeptRows(keys, None if self.hidden is None else leaf(self.hidden))


@dataclass
class HeldSegment:
    """A segment that several micro-batches read."""

    parent: int | None
    size: int  # rows
    users: list[int] = field(default_factory=list)  # micro-batches, in their order
    read: Bools = field(default_factory=lambda: np.zeros(0, bool))  # rows whose output a micro-batch reads
    made: KeptRows | None = None  # tensors with their graph; None before its forward and after its backward
    leaves: KeptRows | None = None  # the same values as inputs of micro-batches and of segments that follow

    @property
    def place(self) -> Ints:
        """Index of each row among the rows that are read."""
        return np.where(self.read, self.read.cumsum() - 1, 0)

    def finish(self, graded: Iterable[tuple[Tensor, int]]) -> None:
        """Run its backward with the gradients that arrived, and free its tensors. ``graded`` are the parameters that
        have got a gradient from earlier micro-batches."""
        if self.made is None or self.leaves is None:
            return
        pairs = zip(self.made.tensors, self.leaves.tensors, strict=True)
        arrived = [(made, leaf.grad) for made, leaf in pairs if made.requires_grad and leaf.grad is not None]
        is_lost = not arrived and any(made.requires_grad for made in self.made.tensors)
        self.made = self.leaves = None
        if arrived and not all(parameter.requires_grad for parameter, _ in graded):
            raise UsageError(
                "a parameter was frozen between the micro-batches passed to engine.expect, so gradients that wait at "
                "shared prefixes would not reach it: freeze it after optimizer.step()"
            )
        if is_lost:
            raise UsageError(
                "with 'prefixes: update', the function that engine.backward calls must add to .grad of all tensors, as "
                "loss.backward does; this one left out the shared prefixes"
            )
        if arrived:
            torch.autograd.backward([made for made, _ in arrived], [grad for _, grad in arrived])


@final
@dataclass
class MicroBatch:
    """One micro-batch of the update."""

    rows: NeededRows
    known_by: dict[str, Tensor]
    paths: list[list[int]]  # for each example the numbers of its segments
    is_run: bool = False  # whether its forward ran
    is_done: bool = False  # whether its backward ran

    def matches(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether a forward's inputs belong to this micro-batch."""
        for name in COMPARED:
            one, other = self.known_by.get(name), inputs.get(name)
            if (one is None) != (other is None):
                return False
            if one is not None and other is not None and not torch.equal(one, other.to(one.device)):
                return False
        return True


@final
class UpdatePlan:
    """The rows of all micro-batches of one optimizer step."""

    def __init__(self, batches: Sequence[NeededRows], inputs: Sequence[Mapping[str, Any]]) -> None:
        keys = [keys for rows in batches for keys in rows.keys]
        segments, shared = branch(keys)
        self._segments = segments
        paths = list(_find_paths(segments, shared))
        self.batches: list[MicroBatch] = []
        for rows, given in zip(batches, inputs, strict=True):
            known_by = {name: given[name] for name in COMPARED if given.get(name) is not None}
            number = sum(len(batch.paths) for batch in self.batches)
            self.batches.append(MicroBatch(rows, known_by, paths[number : number + len(rows.needed_BT)]))
        self.held = self._find_held()
        self._guard: Any = None
        self._graded: list[tuple[Tensor, int]] = []  # parameters with a gradient, and its version, after a backward
        self.switches: tuple[object, ...] = ()  # trained parameters and adapters of the first forward

    def _find_held(self) -> dict[int, HeldSegment]:
        users: dict[int, list[int]] = {}
        for number, batch in enumerate(self.batches):
            for one in sorted({one for path in batch.paths for one in path}):
                users.setdefault(one, []).append(number)
        held: dict[int, HeldSegment] = {}
        for number in sorted(users):  # a segment comes after its parent
            segment = self._segments[number]
            size = segment.end - segment.start
            is_child = segment.parent is None or segment.parent in held
            # A shorter segment costs a separate forward and saves few rows, and so do segments after it.
            if len(users[number]) > 1 and is_child and size >= MIN_SHARED:
                held[number] = HeldSegment(segment.parent, size, users[number], np.zeros(size, bool))
        self._leave_own(held)
        for number, batch in enumerate(self.batches):
            for path, read in zip(batch.paths, batch.rows.reads, strict=True):
                for one in (n for n in path if n in held and number in held[n].users):
                    segment = self._segments[one]
                    held[one].read |= read[segment.start : segment.end]
        return held

    def _leave_own(self, held: dict[int, HeldSegment]) -> None:
        """For each micro-batch without own rows, stop sharing one segment with it, since a forward needs a row. This
        occurs if all its examples are also in other micro-batches, as when a step uses its batches twice."""
        for number, batch in enumerate(self.batches):
            chosen = {one for path in batch.paths for one in path}
            if chosen <= held.keys():
                last = chosen - {self._segments[one].parent for one in chosen}
                own = min(last, key=lambda one: (held[one].size, one))
                held[own].users.remove(number)
                if len(held[own].users) < 2:  # no held segment follows it, since its users would be among these
                    del held[own]

    @property
    def num_saved(self) -> int:
        """Rows that are computed once instead of once in each micro-batch."""
        return sum((len(held.users) - 1) * held.size for held in self.held.values())

    @property
    def most_rows(self) -> int:
        """The largest number of held rows at a time."""
        return max(
            sum(h.size for h in self.held.values() if h.users[0] <= number <= h.users[-1])
            for number in range(len(self.batches))
        )

    def find(self, inputs: Mapping[str, Any]) -> int | None:
        """Return the number of the first waiting micro-batch with a forward's inputs; None if there is none."""
        waiting = (n for n, batch in enumerate(self.batches) if not batch.is_run)
        return next((number for number in waiting if self.batches[number].matches(inputs)), None)

    def withdraw(self, number: int) -> None:
        """Let a micro-batch run without held segments: it computes all its rows, and sends no gradient to them."""
        batch = self.batches[number]
        batch.is_run = batch.is_done = True

    def held_of(self, number: int) -> list[int]:
        """Return the held segments that a micro-batch reads, parents first."""
        chosen = {n for path in self.batches[number].paths for n in path if n in self.held}
        return sorted(n for n in chosen if number in self.held[n].users)

    def arrange(self, number: int, device: torch.device, most_read: float | None) -> PackedLayout:
        """Return the rows that a micro-batch computes itself; ``most_read`` None: the last layer runs all rows."""
        batch = self.batches[number]
        chosen = sorted({segment for path in batch.paths for segment in path})
        local = {segment: place for place, segment in enumerate(chosen)}
        example_of = {s: next(e for e, path in enumerate(batch.paths) if s in path) for s in chosen}
        shared, held = [], set(self.held_of(number))
        for example, path in enumerate(batch.paths):
            others = [s for s in path if s in held or example_of[s] != example]
            shared.append((self._segments[others[-1]].end, local[others[-1]]) if others else (0, -1))
        starts, kept = 0, dict[int, Ints]()
        for segment in self.held_of(number):
            kept[local[segment]] = self.held[segment].place + starts
            starts += int(self.held[segment].read.sum())
        return self._arrange(batch, [(s, example_of[s]) for s in chosen], shared, kept, device, most_read)

    def arrange_held(self, number: int, segment: int, device: torch.device, most_read: float | None) -> PackedLayout:
        """Return the rows of a held segment, with the positions that they have in a micro-batch."""
        batch = self.batches[number]
        example, path = next((e, path) for e, path in enumerate(batch.paths) if segment in path)
        chain = path[: path.index(segment) + 1]
        shared = [(0, -1)] * len(batch.paths)
        kept = {place: np.zeros(self.held[s].size, np.int64) for place, s in enumerate(chain[:-1])}
        read_BT = np.zeros_like(batch.rows.read_BT)
        found = self._segments[segment]
        source = batch.rows.sources[example][found.start : found.end]
        read_BT.reshape(-1)[source[self.held[segment].read]] = True
        return self._arrange(batch, [(s, example) for s in chain], shared, kept, device, most_read, read_BT)

    def _arrange(
        self,
        batch: MicroBatch,
        chosen: Sequence[tuple[int, int]],
        shared: list[tuple[int, int]],
        kept: Mapping[int, Ints],
        device: torch.device,
        most_read: float | None,
        read_BT: Bools | None = None,
    ) -> PackedLayout:
        local = {segment: place for place, (segment, _) in enumerate(chosen)}
        segments = []
        for number, example in chosen:
            segment = self._segments[number]
            parent = None if segment.parent is None else local[segment.parent]
            segments.append(Segment(example, segment.start, segment.end, parent))
        rows, read = batch.rows, batch.rows.read_BT if read_BT is None else read_BT
        wanted = None if most_read is None else (read, most_read)
        return arrange_segments(
            segments, shared, rows.sources, rows.position_BT, rows.place_BT, wanted, device, is_causal=True, kept=kept
        )

    def open(self, number: int, run: RunRows, device: torch.device, most_read: float | None) -> list[KeptRows]:
        """Return the stored tensors of the held segments that a micro-batch reads. Run segments that have none yet."""
        self.batches[number].is_run = True
        self._follow_clearing()
        for segment in self.held_of(number):
            held = self.held[segment]
            if held.made is None:
                held.made = self._run(number, segment, self._leaves, run, device, most_read)
                held.leaves = held.made.cut()
        if self._guard is None and self.held_of(number):
            self._guard = register_optimizer_step_pre_hook(self._refuse_step)
        return [self._leaves(segment) for segment in self.held_of(number)]

    def note_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Record after a backward which parameters have a gradient."""
        self._graded = [(p, version_of(p.grad)) for p in parameters if p.requires_grad and p.grad is not None]

    def _follow_clearing(self) -> None:
        """If the script has cleared all gradients since, clear what waits at the held segments as well."""
        grads = [(parameter.grad, version) for parameter, version in self._graded]
        if grads and all(grad is None or (version_of(grad) != version and not grad.any()) for grad, version in grads):
            for leaf in (
                leaf for held in self.held.values() if held.leaves is not None for leaf in held.leaves.tensors
            ):
                leaf.grad = None

    def run_whole(self, number: int, run: RunRows, device: torch.device, most_read: float | None) -> list[KeptRows]:
        """Return the same tensors in one graph with the micro-batch and store nothing, for a comparison."""
        found: dict[int, KeptRows] = {}
        for segment in self.held_of(number):
            found[segment] = self._run(number, segment, found.__getitem__, run, device, most_read)
        return list(found.values())

    def _leaves(self, segment: int) -> KeptRows:
        leaves = self.held[segment].leaves
        if leaves is None:
            raise UsageError(
                "a micro-batch ran again after the backward of its shared prefix: run each micro-batch once"
            )
        return leaves

    def _run(
        self,
        number: int,
        segment: int,
        rows_of: Callable[[int], KeptRows],
        run: RunRows,
        device: torch.device,
        most_read: float | None,
    ) -> KeptRows:
        held, layout = self.held[segment], self.arrange_held(number, segment, device, most_read)
        chain, parent = list[int](), held.parent
        while parent is not None:
            chain.insert(0, parent)
            parent = self.held[parent].parent
        collected: Collected = {}
        hidden = run(layout, [rows_of(s) for s in chain], collected)
        if any(len(pairs) > 1 for pairs in collected.values()):
            raise UnsupportedError("leave out engine.expect, which does not support layers that call attention twice")
        keys = {module: pairs[0] for module, pairs in collected.items()}
        row_R = torch.from_numpy(np.flatnonzero(held.read)).to(device)
        return KeptRows(keys, layout.take(hidden, row_R, [hidden[:, :0]]) if len(row_R) else None)

    def watch(self, number: int, hidden: Tensor) -> None:
        """Detect the backward of a micro-batch by the gradient of its head's input."""

        def note(_: Tensor) -> None:
            self.batches[number].is_done = True

        if hidden.requires_grad:
            hidden.register_hook(note)
        else:
            self.batches[number].is_done = True

    def finish(self) -> bool:
        """Run the backward of each held segment after all its micro-batches. Return whether the plan is complete."""
        try:
            for number in sorted(self.held, reverse=True):  # each segment before its parent
                if all(self.batches[user].is_done for user in self.held[number].users):
                    self.held[number].finish(self._graded)
        except UsageError:
            self.drop()
            raise
        is_over = all(batch.is_done for batch in self.batches)
        if is_over:
            self.drop()
        return is_over

    @property
    def is_open(self) -> bool:
        """Whether held segments still wait for gradients."""
        return any(held.made is not None for held in self.held.values())

    def drop(self) -> None:
        """Free the held segments."""
        for held in self.held.values():
            held.made = held.leaves = None
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        is_own = not self._graded or any(id(parameter) in stepped for parameter, _ in self._graded)
        if self.is_open and is_own:
            waiting = sum(not batch.is_done for batch in self.batches)
            self.drop()
            raise UsageError(
                f"optimizer.step() was called before the backward of {waiting} of the {len(self.batches)} "
                "micro-batches passed to engine.expect, so gradients of their shared prefixes are incomplete"
            )


@dataclass
class HeldRows:
    """Counts of rows that micro-batches have shared so far, over all updates."""

    updates: int = 0
    shared: int = 0  # updates whose micro-batches had common prefixes
    saved: int = 0  # rows that were not computed again
    most: int = 0  # largest number of rows held at a time
    alone: int = 0  # micro-batches that read more than the script declared, or in another state of the model
    unfit: int = 0  # updates with a micro-batch that cannot share prefixes with others
    refused: str = ""  # why prefixes are shared only within each batch; empty: they are shared over the update

    def add(self, update: UpdatePlan) -> None:
        """Count a plan."""
        self.updates += 1
        if update.held:
            self.shared += 1
            self.saved += update.num_saved
            self.most = max(self.most, update.most_rows)

    def describe(self) -> str:
        """Return a sentence for the report."""
        if self.refused:
            return (
                "prefixes are shared only within each batch: sharing them over an update is not supported with "
                f"{self.refused}"
            )
        if self.unfit and not self.shared:
            return (
                f"prefixes are shared only within each batch: {self.unfit} updates have a label at the first position "
                "of a text padded on the left, several texts in a row, or batches that run without lossless"
            )
        if not self.updates:
            return "prefixes are shared only within each batch: pass the micro-batches of an update to engine.expect"
        if not self.shared:
            return f"the micro-batches of {self.updates} updates have no prefix in common"
        alone = (
            f"; {self.alone} micro-batches ran without shared prefixes: they needed outputs of more positions than at "
            "engine.expect, or had other adapters or trained parameters than the first micro-batch"
        )
        return (
            f"sharing prefixes skipped {self.saved:,} token positions in {self.shared} of {self.updates} updates; "
            f"at most {self.most:,} positions in memory{alone if self.alone else ''}"
        )


def _find_paths(segments: Sequence[Segment], shared: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the segments of each example, from its first position on."""
    own: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        own.setdefault(segment.example, []).append(number)
    for example, (length, last) in enumerate(shared):
        path = list[int]()
        before = last if length else None
        while before is not None:
            path.insert(0, before)
            before = segments[before].parent
        yield [*path, *own.get(example, [])]
