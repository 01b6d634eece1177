"""Packing in one model: its forward computes the rows that the loss needs, and returns the output that callers expect.

The base model runs on one sequence of rows instead of a batch. The head of a causal language model runs on the rows
with a label. The forward returns the loss, or the logits of all positions but padding, in the shapes of the plain
forward.

Shape letters: B examples, T positions, N computed rows, R rows of the head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, final

from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineView
from sparsebp_cli.backward.decoder.decoder import argument_names
from sparsebp_cli.backward.kind.packing.forward import PackedForward
from sparsebp_cli.backward.kind.packing.head import count_rows
from sparsebp_cli.backward.kind.packing.last_layer import install_last_layer
from sparsebp_cli.backward.kind.packing.mixer import install_mixers
from sparsebp_cli.backward.kind.packing.pair import PairBatch
from sparsebp_cli.backward.kind.packing.planner import PackingPlanner
from sparsebp_cli.backward.kind.packing.reference import PackedReference
from sparsebp_cli.backward.kind.packing.refusal import (
    find_picture,
    refuse_arguments,
)
from sparsebp_cli.backward.kind.packing.scoring import Reads
from sparsebp_cli.backward.observe.flops import DensePass, PassEstimate
from sparsebp_cli.backward.patch.forward import (
    ModulePlaces,
)
from sparsebp_cli.policy import BatchPacker

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.given import Given


@final
class PackingExtension(PackingPlanner):
    """A batch packer in one model.

    Raises :class:`UnsupportedError` if skipping rows would change this model's gradient.
    """

    def __init__(self, policy: BatchPacker, model: nn.Module, given: Given) -> None:
        super().__init__(policy, model)
        self.reference = PackedReference.of(given.reference, self, PackingExtension)

    @override
    def set_columns(self, **columns: Tensor) -> None:
        """Set the labels of the next batches, until the next call, if the script does not pass them to the model."""
        self.given_labels, self.dead.weight_B = columns.get("labels"), columns.get("example_weight")

    @override
    def check_arguments(self, arguments: Mapping[str, object]) -> None:
        """Refuse arguments that the first forward would refuse. Ignore names that are not arguments of the model."""
        own = argument_names(self.model)
        given = {name: value for name, value in arguments.items() if name in own}
        if not find_picture(self.model, given, self.known_arguments):
            refuse_arguments(given, known=self.known_arguments)

    def install(self, engine: EngineView) -> None:
        self.engine = engine
        if self.reference is not None:
            self.reference.install(engine)
        self._switch.on()
        self._patches.install(self.model, PackedForward(self))
        self.dropout.install(self._patches)
        if self.prompt is not None:
            self.prompt.install(self._patches)
        install_mixers(self._patches, self.mixers)
        self.places = ModulePlaces(self.model)
        if self.pair is not None:
            self.pair.install(self._patches)
        elif self.head is not None and not self.dropout:  # dropout draws masks for all rows of a forward
            self.last_layer = install_last_layer(self._patches, self._text)
        self.note()

    def remove(self) -> None:
        self.drop_update()
        self._patches.remove()
        self._switch.off()
        if self.reference is not None:
            self.reference.remove()

    @override
    @contextmanager
    def reading_by(self, labels: Tensor | None, reads: Reads) -> Iterator[None]:
        """Pack forwards without gradient, including the reference's, of which the script reads only these outputs."""
        with ExitStack() as stack:
            for scoring in (self.scoring, *([] if self.reference is None else self.reference.scorings)):
                stack.enter_context(scoring.reading_by(labels, reads))
            yield

    @property
    @override
    def uncharged_comparisons(self) -> int:
        """Comparisons so far; 0 with ``verify: always``, since probes measure them then."""
        return 0 if self.policy.verify == "always" else self.counts.checks

    @property
    @override
    def work_shares(self) -> tuple[float, ...]:
        """Fractions of positions, pairs of positions and rows of the head that the last pass computed."""
        if self.last is None:
            return 1.0, 1.0, 1.0
        layout, size = self.last.layout, self.last.num_positions
        head = count_rows(self.last) / size if self.head is not None else 1.0
        return layout.num_rows / size, layout.num_pairs / (size * layout.shape[1]), head

    @override
    def claim(self, dense: DensePass) -> PassEstimate:
        """Return the remaining fractions of a dense pass, from the rows of the last forward on the same batch."""
        if self.last is None:
            return PassEstimate()
        is_update = any(batch is self.last for batch in self._ran)
        batches = self._ran if is_update else [self.last]
        layouts = [*(batch.layout for batch in batches), *(self._ran_held if is_update else ())]
        # Batches that ran plainly computed all positions.
        plain = self._ran_plainly if is_update else []
        whole, whole_pairs = sum(number * length for number, length in plain), sum(n * t**2 for n, t in plain)
        size = whole + sum(batch.num_positions for batch in batches)
        pairs_of_all = whole_pairs + sum(batch.num_positions * batch.layout.shape[1] for batch in batches)
        shares = self.pair.shares(self.last) if self.pair is not None and isinstance(self.last, PairBatch) else {}
        spread = self._find_spread()
        for name, module in self.model.named_modules():
            if name in shares or module in spread:
                continue
            if module is self.head:
                shares[name] = (whole + sum(map(count_rows, batches))) / size
            elif hasattr(module, "is_causal"):
                shares[name] = (whole_pairs + sum(layout.num_pairs for layout in layouts)) / pairs_of_all
            else:
                shares[name] = (whole + sum(layout.num_rows for layout in layouts)) / size
        if self.shortens and self.last_layer is not None and any(layout.read is not None for layout in layouts):
            above = set(self.last_layer.module.modules()) - self.last_layer.all_rows
            pairs = (whole_pairs + sum(layout.num_last_pairs for layout in layouts)) / pairs_of_all
            rows = (whole + sum(layout.num_last_rows for layout in layouts)) / size
            shares |= {
                name: pairs if hasattr(module, "is_causal") else rows
                for name, module in self.model.named_modules()
                if module in above
            }
        named = {f"{self._prefix}{name}": share for name, share in shares.items()}
        trained = {name: share * self.dead.trained_share for name, share in named.items()}
        return PassEstimate(backward=trained, forward=named, recomputed=trained)

    def _find_spread(self) -> set[nn.Module]:
        """Return the modules that read (B, T, D) or one row an example: the pooler, and modules above an encoder."""
        pooler = getattr(self.stack, "pooler", None)
        spread = set(pooler.modules()) if isinstance(pooler, nn.Module) else set()
        return spread if self.head is not None else spread | set(self.model.modules()) - set(self.stack.modules())
