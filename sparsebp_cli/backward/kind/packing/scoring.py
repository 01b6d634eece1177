"""Packing of forwards without gradient: references, old log-probabilities, evaluations.

No backward shows which outputs the script reads, so packing acts only if this is known. With labels, it computes the
loss; other outputs are computed plainly on access. trl's fused head returns only outputs for labels. A script may also
declare what it reads (:meth:`~sparsebp_cli.backward.core.engine.Engine.scoring`). All other forwards, such as those of
``generate``, run plainly.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.core.loss_weight import has_causal_loss
from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES
from sparsebp_cli.backward.kind.fused_head import ARGUMENT
from sparsebp_cli.backward.kind.packing.attention import LooksAheadError
from sparsebp_cli.backward.kind.packing.batch import (
    BATCH,
    KNOWN,
    SHIFTED,
    STATES,
    Counts,
    PackedBatch,
    has_cut_labels,
    renew,
)
from sparsebp_cli.backward.kind.packing.head import kept_columns
from sparsebp_cli.backward.kind.packing.output import defer_values
from sparsebp_cli.backward.kind.packing.packed_model import PackedModel
from sparsebp_cli.backward.kind.packing.verify import Check, Comparisons, compare_outputs
from sparsebp_cli.backward.observe.internals import find_hook
from sparsebp_cli.errors import UnsupportedError

_Value = TypeVar("_Value")
Reads = Literal["labels", "loss"]
NOTE = "packing without a gradient"  # the note's name in the report
READS_MORE = (
    "the script reads outputs besides the loss in forwards without gradients, so lossless skips nothing there: leave "
    "the labels out of these forwards, or declare by engine.scoring(...) that you read only positions with a label"
)
CHANGED = (
    "lossless computes outputs other than the loss only when you read them, but the weights have changed since "
    "the forward: read outputs before optimizer.step()"
)


@dataclass(frozen=True)
class Reading:
    """The outputs of forwards without gradient that the script declared to read."""

    labels: Tensor | None  # for forwards without labels; None: the script reads all positions but padding
    reads: Reads


class Passes(ABC):
    """The two ways to run one forward."""

    @abstractmethod
    def compute(self, batch: PackedBatch, given: dict[str, Any]) -> Any:
        """Run the rows of a batch."""

    @abstractmethod
    def find_batch(self, given: dict[str, Any], counts: Counts, labels: Tensor | None) -> PackedBatch | None:
        """Arrange the rows; None if packing saves no work."""

    @abstractmethod
    def run_plain(self, **arguments: Any) -> Any:
        """Run the plain forward."""

    @abstractmethod
    def decide(self, check: Check, given: dict[str, Any]) -> Check:
        """Find out which of two passes that differ is wrong, by a comparison with each example alone."""


@final
class Scoring:
    """The forwards without gradient of one packed model."""

    counts: Counts
    reading: Reading | None
    topic: str
    is_paused: bool

    def __init__(self, extension: PackedModel, topic: str = NOTE) -> None:
        self._extension, self.topic = extension, topic
        self.counts = Counts(compared="outputs")
        self.reading = None  # None outside of engine.scoring()
        self.is_paused = False
        self._stopped = ""  # why forwards with labels run plainly from now on
        self._comparisons = Comparisons(extension.policy.verify, self.counts)

    @contextmanager
    def reading_by(self, labels: Tensor | None, reads: Reads) -> Iterator[None]:
        """Pack forwards of which the script reads only these outputs, even while policies are off."""
        before, self.reading = self.reading, Reading(labels, reads)
        try:
            yield
        finally:
            self.reading = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run forwards plainly, for a comparison."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def takes(self, given: Mapping[str, Any]) -> bool:
        """Return whether to pack a forward with these arguments: its read outputs are known, and it is supported."""
        extension, engine = self._extension, self._extension.engine
        if self.is_paused or extension.failure or engine.reference or not (engine.enabled or self.reading is not None):
            return False
        if extension.model.training and extension.dropout:  # computing outputs later would draw other masks
            return False
        return self._knows_arguments(given) and self._knows_reads(given)

    def _knows_arguments(self, given: Mapping[str, Any]) -> bool:
        """Return whether the arguments contain no cache, and no unknown one that may refer to single positions."""
        known = KNOWN | self._extension.known_arguments - {STATES}
        known = known - {SHIFTED} | {ARGUMENT} if given.get(ARGUMENT) else known
        unknown = (v for name, v in given.items() if name not in known and (isinstance(v, Tensor) or v))
        if any(True for _ in unknown) or given.get("use_cache") or given.get("return_dict") is False:
            return False
        if not any(isinstance(given.get(name), Tensor) and given[name].dim() > 1 for name in BATCH):
            return False
        extension = self._extension
        if extension.head is None:  # without a gradient, nothing detects that a loss of logits reads padding
            has_logits = extension.model.get_output_embeddings() is not None and has_causal_loss(extension.model)
            return given.get("labels") is None or not has_logits
        return extension.pair is not None or not has_cut_labels(given)

    def _knows_reads(self, given: Mapping[str, Any]) -> bool:
        """Return whether it is known which outputs the script reads."""
        has_labels, reading = given.get("labels") is not None, self.reading
        if given.get(ARGUMENT):
            return has_labels
        return (reading is not None and reading.reads == "labels") or (has_labels and not self._stopped)

    def run(self, given: dict[str, Any], passes: Passes, plain: Callable[[], Any]) -> Any:
        """Return the output of a forward that :meth:`takes` accepts."""
        extension = self._extension
        extension.places.check()
        if find_hook(extension.model, inside=True):
            return plain()
        labels = None if self.reading is None else self.reading.labels
        first = next(given[name] for name in BATCH if name in given)
        if labels is not None and given.get("labels") is None and labels.shape != first.shape[:2]:
            raise UnsupportedError(
                f"engine.scoring needs labels of the batch's shape {tuple(first.shape[:2])}, got {tuple(labels.shape)}"
            )
        batch = passes.find_batch(given, self.counts, labels)
        if batch is None or (reason := self._comparisons.find_failure(batch)):
            if batch is not None:
                self.counts.refuse(reason)
            self.counts.add_plain(first.shape[:2].numel())
            self.note()
            return plain()
        try:
            output = passes.compute(batch, renew(given))
            # The returned values must not depend on a comparison, since a resumed run compares other batches.
            more = extension.model.training, _adapters_of(extension.model)  # compare again after a change of adapters
            is_due = self._comparisons.are_due(batch, *more, is_probing=extension.engine.is_probing)
            if is_due and not self._passes(batch, given, passes, output):
                return plain()
        except LooksAheadError:
            if extension.is_causal is False:
                raise
            extension.is_causal = False  # its first mask shows it
            return self.run(given, passes, plain)
        extension.is_causal = batch.layout.is_causal
        extension.count(batch, self.counts)
        self.note()
        return self._finish(output, given, plain)

    def _finish(self, output: Any, given: Mapping[str, Any], plain: Callable[[], Any]) -> Any:
        """Return an output whose other values are computed when the script reads them."""
        is_read = self.reading is not None and self.reading.reads == "labels"
        if given.get(ARGUMENT) or given.get("labels") is None or is_read:
            return output

        def read() -> Any:
            self._stopped = READS_MORE
            self.note()
            return plain()

        values = vars(output)  # avoids the attribute access that would compute logits
        names = [f.name for f in fields(output) if f.name != "loss" and values.get(f.name) is not None]
        caches = CACHE_NAMES if self._extension.uses_cache(given) else ()
        return defer_values(output, [*names, *caches], self.later(read))

    def later(self, compute: Callable[[], _Value], changed: str = CHANGED) -> Callable[[], _Value]:
        """Return a function that runs ``compute`` plainly without gradient, in the present state; ``changed`` is the
        error if the weights have changed since."""
        model = self._extension.model
        device = next(model.parameters()).device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        version = _version_of(model)

        def run() -> _Value:
            if _version_of(model) != version:
                raise UnsupportedError(changed)
            with torch.no_grad(), self.paused(), torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                return compute()

        return run

    def _passes(self, batch: PackedBatch, given: dict[str, Any], passes: Passes, packed: Any) -> bool:
        """Compare an output with the plain forward; return whether it can be used."""
        extension = self._extension
        rows = batch.layout.computed_BT
        if extension.head is not None:
            rows = batch.read_BT[:, kept_columns(given.get("logits_to_keep"))]
        with self.paused():
            check = compare_outputs(extension.model, rows, partial(passes.run_plain, **renew(given)), packed)
            if not check.passed and extension.pair is None:
                check = passes.decide(check, given)
        self._comparisons.count(check)
        if not check.passed:
            self._comparisons.failed[batch.signature] = check.describe()
            self.counts.refuse(check.describe())
            self.counts.add_plain(rows.numel())
            self.note()
        return check.passed

    def note(self) -> None:
        """Write the counts into the report."""
        extension = self._extension
        stopped = f"; {self._stopped}" if self._stopped else ""
        extension.engine.notes[self.topic] = extension.failure or self.counts.describe() + stopped


def _version_of(model: nn.Module) -> int:
    """Return a number that grows with each change of a parameter in place."""
    return sum(parameter._version for parameter in model.parameters())  # noqa: SLF001 - what autograd itself counts


def _adapters_of(model: nn.Module) -> tuple[object, ...]:
    """Return which of peft's adapters are active, from the first layer with adapters, which represents all."""
    for module in model.modules():
        state = getattr(module, "disable_adapters", None)
        if isinstance(state, bool):  # a layer's attribute; a transformers model has a method of this name
            return (state, *getattr(module, "active_adapters", ()))
    return ()


def run_scored(scoring: Scoring, passes: Passes, arguments: dict[str, Any]) -> Any:
    """Run a forward without gradient, packed if the outputs that the script reads are known."""
    given = {name: value for name, value in arguments.items() if value is not None}
    plain = partial(passes.run_plain, **arguments)
    return scoring.run(given, passes, plain) if scoring.takes(given) else plain()
