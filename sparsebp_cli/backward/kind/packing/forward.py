"""The forward of a model whose batches are packed: the computed rows of a batch, and the output for the caller.

Shape letters: B examples, T positions, N computed rows, R rows of the head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import argument_names, find_reentrant, without_reentrance
from sparsebp_cli.backward.decoder.kv_cache import CACHE_NAMES
from sparsebp_cli.backward.isolation import compare_with_alone
from sparsebp_cli.backward.kind.fused_head import ARGUMENT
from sparsebp_cli.backward.kind.packing.attention import LooksAheadError
from sparsebp_cli.backward.kind.packing.balance import (
    balances_experts,
    find_coefficient,
    spread_routers,
)
from sparsebp_cli.backward.kind.packing.batch import (
    BATCH,
    KNOWN,
    SHIFTED,
    Counts,
    PackedBatch,
    find_predicting,
    find_targets,
    has_cut_labels,
    renew,
)
from sparsebp_cli.backward.kind.packing.fused import run_fused
from sparsebp_cli.backward.kind.packing.groups import Bools, to_tensor
from sparsebp_cli.backward.kind.packing.head import (
    kept_columns,
    read_rows,
    run_head,
    spread_logits,
    spread_states,
    states_of,
)
from sparsebp_cli.backward.kind.packing.layout import PackedLayout
from sparsebp_cli.backward.kind.packing.loss import labels_at, run_loss, weigh_labels
from sparsebp_cli.backward.kind.packing.pair import ARGUMENTS, PairBatch
from sparsebp_cli.backward.kind.packing.planner import PackingPlanner
from sparsebp_cli.backward.kind.packing.prompt import make_table
from sparsebp_cli.backward.kind.packing.refusal import (
    find_whole,
    refuse_arguments,
)
from sparsebp_cli.backward.kind.packing.scoring import Passes, run_scored
from sparsebp_cli.backward.kind.packing.sequence import SEQUENCES
from sparsebp_cli.backward.kind.packing.tiled_head import TiledRun
from sparsebp_cli.backward.kind.packing.update import Collected, KeptRows
from sparsebp_cli.backward.kind.packing.verify import Check, compare_passes, limit_of
from sparsebp_cli.backward.kind.packing.weight import find_weightless
from sparsebp_cli.backward.observe.internals import find_hook, is_in_transform
from sparsebp_cli.backward.patch.boundary import ReadsUncomputedError, checked
from sparsebp_cli.backward.patch.deferred import defer_logits
from sparsebp_cli.backward.patch.forward import (
    ForwardOverride,
    call_module,
    replace_forwards,
    uncompiled,
)
from sparsebp_cli.backward.patch.rewind import keeping_buffers
from sparsebp_cli.backward.patch.rng import capture_generators, generators_at
from sparsebp_cli.errors import UnsupportedError, UsageError

LOSS_ARGUMENTS = {"labels", "num_items_in_batch", SHIFTED}


class PackedForward(ForwardOverride, Passes):
    """The ``forward`` of a model whose batches are packed."""

    def __init__(self, extension: PackingPlanner) -> None:
        self.extension = extension
        self._is_comparing = False
        self._plain: dict[str, Tensor] = {}  # outputs of the plain step in a comparison, for the script
        self._model = extension.model
        self._names = argument_names(self._model)
        # Do not compile, since the number of rows differs from step to step. Compiled layers stay compiled.
        self._run = uncompiled(self._pack)
        self._score = uncompiled(partial(run_scored, extension.scoring, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if args and args[0] is self._model:  # accelerate's wrapper calls the wrapped forward as a method
            args = args[1:]
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        extension = self.extension
        if not (self.is_removed or torch.is_grad_enabled() or torch.compiler.is_compiling()):
            return self._score(arguments)
        active = extension.engine.enabled and extension.trains and self._model.training and torch.is_grad_enabled()
        if self.is_removed or not active or extension.failure or extension.engine.reference:
            return self.run_covered(self._model, **arguments)
        return self._run(arguments)

    @contextmanager
    def reading(self, labels_BT: Tensor) -> Iterator[None]:
        """Compute the rows that these labels need, in forwards without labels inside the block."""
        extension, before = self.extension, self.extension.given_labels
        extension.given_labels = labels_BT
        try:
            yield
        finally:
            extension.given_labels = before

    def _pack(self, arguments: dict[str, Any]) -> Any:
        if is_in_transform():
            raise UnsupportedError(
                "torch.func (vmap, grad, jacrev) on a model with lossless is not supported: run it inside "
                "engine.disabled()"
            )
        self.extension.later_dropout.check()
        given = {name: value for name, value in arguments.items() if value is not None}
        # Do not split the batch if its loss balances experts or its dropout is active: both refer to the whole batch.
        if not given.get(ARGUMENT) or balances_experts(self._model, given) or self.extension.dropout:
            return self._pack_part(arguments)
        output = self.extension.dead.run(given, self._pack_part, self._score)
        self.extension.note()
        return output

    def run_plain(self, **arguments: Any) -> Any:
        """Run the plain forward."""
        return self.run_covered(self._model, **arguments)

    def _pack_part(self, arguments: dict[str, Any]) -> Any:
        extension, counts = self.extension, self.extension.counts
        extension.places.check()
        given = {name: value for name, value in arguments.items() if value is not None}
        plain = partial(self.run_covered, self._model, **arguments)
        fused = {ARGUMENT} if self.covered is not None and extension.pair is None else set[str]()
        known = extension.known_arguments | fused
        known -= {SHIFTED} if given.get(ARGUMENT) else set()
        if reason := self._find_whole(given, known):
            counts.refuse(reason)
            return self._run_whole(given, plain)
        refuse_arguments(given, known=known)
        hook = find_hook(self._model, inside=True)
        if hook:
            extension.failure = f"{hook}: lossless is off from here on"
            extension.note()
            return plain()
        batch = self.find_batch(given, counts, extension.given_labels)
        extension.last = batch
        if batch is None:
            return self._run_whole(given, plain)
        try:
            reason, is_probing = extension.comparisons.find_failure(batch), extension.engine.is_probing
            is_compared = not reason and extension.comparisons.are_due(batch, is_probing=is_probing)
            if is_compared:
                self._verify(batch, given)
                reason = extension.comparisons.find_failure(batch)
            if reason:
                counts.refuse(reason)
                return self._run_whole(given, plain)
            leaves = extension.head is not None or extension.stack is self._model  # the output goes to the script
            with checked(self._plain) if is_compared and leaves and extension.pair is None else nullcontext():
                output = self.compute(batch, given)
        except LooksAheadError:
            if extension.is_causal is False:
                raise
            extension.is_causal = False  # its first mask shows it
            extension.drop_update()
            return self._pack_part(arguments)
        finally:
            self._plain = {}
        extension.is_causal = batch.layout.is_causal
        extension.add_run(batch)
        extension.count(batch, counts)
        extension.note()
        return output.to_tuple() if given.get("return_dict") is False else output

    def _find_whole(self, given: Mapping[str, Any], known: Collection[str]) -> str:
        """Return why a batch with these arguments runs plainly; empty if it does not."""
        has_targets = self.extension.head is not None and self.extension.pair is None
        if has_targets and has_cut_labels(given):
            return "their labels do not have the shape (examples, positions) of the batch"
        return find_whole(self._model, given, known)

    def _run_whole(self, given: Mapping[str, Any], plain: Callable[[], Any]) -> Any:
        """Run the plain forward on a batch without rows to skip, and count it."""
        size = next(given[name] for name in BATCH if name in given).shape[:2]
        self.extension.last = None
        self.extension.add_plain_run(size)
        self.extension.counts.add_plain(size.numel())
        self.extension.note()
        return plain()

    def find_batch(self, given: dict[str, Any], counts: Counts, labels: Tensor | None) -> PackedBatch | None:
        """Arrange the rows of a batch; None if packing saves no work.

        ``labels`` are the script's labels, for a forward without labels.
        """
        extension = self.extension
        if extension.pair is not None and find_reentrant(self._model) is not None:
            counts.refuse("the model is an encoder-decoder with reentrant checkpointing: set use_reentrant=False")
            return None
        if extension.pair is not None:
            return extension.pair.plan(given)
        read = self._read(given, labels)
        weightless = self._find_weightless(given) if torch.is_grad_enabled() else None
        if weightless is None or extension.head is None:
            return self._plan(given, read, counts)
        left = weightless if read is None else read & weightless
        batch = self._plan(given, ~weightless if read is None else read & ~weightless, counts)
        return None if batch is None else replace(batch, weightless=int(left.sum()))

    def _plan(self, given: dict[str, Any], read: Bools | None, counts: Counts) -> PackedBatch | None:
        extension = self.extension
        batch = extension.plan_of_update(given, read) if torch.is_grad_enabled() else None
        return extension.plan(given, read, counts=counts) if batch is None else batch

    def _find_weightless(self, given: Mapping[str, Any]) -> Bools | None:
        """Return the positions that have weight zero in the loss of this forward; None: no such position."""
        weight_B = None if given.get(ARGUMENT) else self.extension.dead.weight_B
        if weight_B is not None and "labels" in given:
            raise UsageError(
                "example_weight needs your own loss, but this forward computes the model's loss: leave out the "
                "labels, or use engine.columns(loss_weight=...)"
            )
        first = next(given[name] for name in BATCH if name in given)
        return find_weightless(self._model, (int(first.shape[0]), int(first.shape[1])), weight_B)

    def _read(self, given: Mapping[str, Any], labels: Tensor | None) -> Bools | None:
        """Return the positions of a causal language model whose logits are read; None: all positions but padding."""
        if self.extension.head is None:
            return None
        target_BT = find_targets(given, labels)
        if target_BT is not None:
            return find_predicting(target_BT)
        kept = given.get("logits_to_keep", 0)
        if isinstance(kept, int) and kept == 0:
            return None
        first = next(given[name] for name in BATCH if name in given)
        mask = given.get("attention_mask")
        real: Bools = np.ones(first.shape[:2], bool) if mask is None else mask.cpu().numpy().astype(bool)
        columns = np.zeros(first.shape[1], bool)
        columns[slice(-kept, None) if isinstance(kept, int) else kept.cpu().numpy()] = True
        return real & columns

    def _verify(self, batch: PackedBatch, given: dict[str, Any]) -> None:
        """Compare the packed step of this batch with the plain one, and record the result."""
        extension = self.extension
        if find_reentrant(self._model) is not None:  # the comparison runs without reentrant checkpointing
            extension.shortens = False
        whole, inputs = given, _copy_computed(given)
        tokens = None if extension.prompt is None else extension.prompt.find_tokens(given)
        given = given | inputs | {"return_dict": True}  # a tuple does not show which of its parts is the loss
        if tokens is not None and "inputs_embeds" in inputs:
            # A shared row has the gradient of all its examples, so compare by token, not by position.
            table_UD, number_BT = make_table(inputs["inputs_embeds"].detach(), tokens)
            inputs = inputs | {"inputs_embeds": table_UD.requires_grad_()}
            given = given | {"inputs_embeds": partial(table_UD.__getitem__, number_BT)}  # a graph for each pass
        leaves = [*(p for p in self._model.parameters() if p.requires_grad), *inputs.values()]
        if not leaves:
            return  # no gradient could differ
        enabled = extension.engine.enabled
        extension.engine.enabled, self._is_comparing = False, True
        try:
            with extension.scoring.paused(), without_reentrance(self._model), extension.dropout.apart():
                check = self._compare(batch, given, leaves)
                if not check.passed and extension.pair is None:
                    check = self.decide(check, whole)
        except ReadsUncomputedError:
            extension.refuse(batch, "the model's own loss reads positions of padding")
            extension.note()
            return
        finally:
            extension.engine.enabled, self._is_comparing = enabled, False
        extension.note(check, batch)

    def _compare(self, batch: PackedBatch, given: dict[str, Any], leaves: list[Tensor]) -> Check:
        rows = batch.layout.computed_BT
        if self.extension.head is not None:
            rows = batch.read_BT[:, kept_columns(given.get("logits_to_keep"))]
        device = batch.layout.source_N.device
        again = partial(generators_at, capture_generators(device), device)  # with the same masks of dropout

        def run(forward: Callable[[dict[str, Any]], Any]) -> Any:
            with again(), keeping_buffers(self._model):
                made = {name: value() if isinstance(value, partial) else value for name, value in given.items()}
                return forward(renew(made))

        return compare_passes(
            self._model,
            leaves,
            rows,
            batch.layout.computed_BT,
            lambda: run(self._run_kept),
            lambda: run(partial(self.compute, batch)),
        )

    def _run_kept(self, inputs: dict[str, Any]) -> Any:
        """Run the plain forward, and store the outputs that a script would read."""
        output = self.run_covered(self._model, **inputs)
        if self.extension.head is not None and "labels" not in inputs and isinstance(output.logits, Tensor):
            self._plain = {"logits": output.logits.detach()}
        elif isinstance(hidden := getattr(output, "last_hidden_state", None), Tensor):
            self._plain = {"hidden states": hidden.detach()}
        self._plain |= {name: state.detach() for name, state in states_of(output).items()}
        return output

    def decide(self, check: Check, given: dict[str, Any]) -> Check:
        """Return the check with the pass that is wrong, found by comparing both passes with each example alone."""
        extension = self.extension
        inputs = {n: v for n, v in given.items() if n not in LOSS_ARGUMENTS | {"return_dict", ARGUMENT}}
        batch = extension.plan(inputs, None, whole=True)
        if batch is None:
            return check
        # Run below the model's hooks, like both passes: the outer forward has not ended, and hooks hold its state.
        plain_forward = partial(self.run_covered, self._model)
        passes = (partial(plain_forward, **renew(inputs)), partial(self.compute, batch, renew(inputs)))
        try:
            with extension.scoring.paused():
                plain, packed = compare_with_alone(self._model, extension.find_examples(inputs), passes, plain_forward)
        except Exception:  # a model may raise anything for a single example
            return check
        return check.decide(plain, packed)

    def compute(self, batch: PackedBatch, given: dict[str, Any]) -> Any:
        extension = self.extension
        known = KNOWN | ARGUMENTS | SEQUENCES | {SHIFTED}
        options = {name: value for name, value in given.items() if name not in known} | {
            "return_dict": True,
            "use_cache": False,
        }
        # Sites count only forwards that a backward follows.
        short = extension.engine.short_forward(num_rows=batch.layout.shape[0] * batch.layout.shape[1])
        with short if torch.is_grad_enabled() else nullcontext():
            if extension.pair is not None and isinstance(batch, PairBatch):
                output, num_calls = extension.pair.compute(batch, given, options)
                extension.check_calls(num_calls)
                return output
            if extension.head is None:
                return self._compute_spread(batch, given, options)
            return self._compute_causal(batch, given, options)

    def _compute_spread(self, batch: PackedBatch, given: dict[str, Any], options: dict[str, Any]) -> Any:
        """Pack only the base model; modules above it read (B, T, D)."""
        extension, stack = self.extension, self.extension.stack

        def run_stack(*args: Any, **kwargs: Any) -> Any:
            kwargs = dict(zip(argument_names(stack), args, strict=False)) | kwargs
            inside = {n: v for n, v in kwargs.items() if n not in {*BATCH, "attention_mask", "position_ids"}}
            with replace_forwards(_spread_first(stack, batch)):
                output = extension.run_rows(
                    batch.layout,
                    kwargs,
                    lambda taken: call_module(stack, **inside | taken | {"return_dict": True}),
                    count_N=batch.count_N,
                )
            states = spread_states(output, batch.layout)
            return replace(output, last_hidden_state=batch.layout.spread(output.last_hidden_state[0]), **states)

        if stack is self._model:
            return run_stack(**given | options)
        with replace_forwards([(stack, run_stack)]):
            return call_module(self._model, **given | options)

    def _compute_causal(self, batch: PackedBatch, given: dict[str, Any], options: dict[str, Any]) -> Any:
        extension = self.extension
        rows, before = read_rows(batch), self._rows_before(batch, given, options)
        take = partial(self._take, batch, before)
        if extension.shortens is None and batch.layout.read is not None:
            rows_of = partial(take, row_R=rows)
            extension.shortens = self._try_last_layer(batch.layout, given, options, rows_of, before)
        if given.get(ARGUMENT):
            return self._compute_fused(batch, given, options, rows, before)
        index, inverse = rows, torch.arange(len(rows), device=rows.device)
        if batch.layout.num_shared:
            index, inverse = (to_tensor(part, rows.device) for part in batch.head_rows)
        if not len(rows):  # the head needs at least one row
            index = rows.new_zeros(1)
        head = extension.head
        assert head is not None
        target_BT = find_targets(given)
        tiles = None if target_BT is None else self._start_tiles(batch, given, target_BT, index)
        forward = partial(run_head, head, head.__dict__.get("forward")) if tiles is None else tiles
        cut = partial(forward, partial(take, row_R=index))
        with replace_forwards([(head, cut)]):
            output = extension.run_rows(
                batch.layout,
                given,
                lambda taken: call_module(self._model, **options | taken),
                before=before,
                count_N=batch.count_N,
            )
        logits, kept = output.logits[0], given.get("logits_to_keep")
        spread_rows = {**spread_routers(output, batch.layout), **spread_states(output, batch.layout)}
        if target_BT is None:
            spread_out = spread_logits(logits, inverse, batch, kept)
            return _changed(output, logits=spread_out, **spread_rows)
        if tiles is None:
            chosen = logits.index_select(0, inverse) if batch.layout.num_shared and len(rows) else logits
            loss, read = run_loss(self._model, chosen, target_BT, batch.place_R, given), logits.detach().detach
        else:
            loss = tiles.loss
            read = extension.tiles.reader(tiles, extension.scoring.later, extension.note if self._trains else None)
        balancing = getattr(output, "aux_loss", None)
        if isinstance(balancing, Tensor):
            loss = loss + (find_coefficient(self._model) or 0.0) * balancing
        output = _changed(output, loss=loss, logits=None, **spread_rows)

        def spread() -> Tensor:
            return spread_logits(read(), inverse, batch, kept)

        if not batch.weightless or extension.scoring.is_paused:
            return defer_logits(output, spread)
        return defer_logits(output, extension.scoring.later(partial(self._all_logits, given)))

    def _rows_before(self, batch: PackedBatch, given: dict[str, Any], options: dict[str, Any]) -> Sequence[KeptRows]:
        """Return the held rows that this batch shares with other micro-batches of its update. In a comparison, compute
        them for this batch alone."""
        extension, number = self.extension, batch.number
        update = None if number is None else extension.update
        if update is None or number is None:
            return ()
        head, device = extension.head, batch.layout.source_N.device
        options = {name: value for name, value in options.items() if name != ARGUMENT}
        assert head is not None

        def run(layout: PackedLayout, before: Sequence[KeptRows], collected: Collected) -> Tensor:
            found: list[Tensor] = []
            # Find this out before any shared row runs, since a resumed run may begin at any of the batches.
            if extension.shortens is None and layout.read is not None:
                rows_of = partial(layout.take, row_R=layout.read.row_M)
                extension.shortens = self._try_last_layer(layout, given, options, rows_of, before)

            def keep(hidden: Tensor) -> Tensor:
                found.append(hidden)
                return hidden[:, :1]

            with replace_forwards([(head, keep)]):
                extension.run_rows(
                    layout,
                    given,
                    lambda taken: call_module(self._model, **options | taken),
                    before=before,
                    keeps=collected,
                )
            if not self._is_comparing:
                extension.add_held(layout)
            return found[0]

        open_held = update.run_whole if self._is_comparing else update.open
        return open_held(number, run, device, extension.most_read)

    def _take(self, batch: PackedBatch, before: Sequence[KeptRows], hidden: Tensor, row_R: Tensor) -> Tensor:
        """Return the rows (1, R, D) for the head."""
        outputs = [rows.hidden for rows in before if rows.hidden is not None]
        taken = batch.layout.take(hidden, row_R, outputs)
        update = None if batch.number is None or self._is_comparing else self.extension.update
        if update is not None and batch.number is not None and torch.is_grad_enabled():
            update.watch(batch.number, taken)
        return taken

    def _all_logits(self, given: Mapping[str, Any]) -> Tensor:
        """Return the logits of the plain forward, for a script that reads logits at positions of weight zero."""
        inputs = {name: value for name, value in given.items() if name not in LOSS_ARGUMENTS}
        logits: Tensor = self.run_plain(**inputs).logits
        return logits

    @property
    def _trains(self) -> bool:
        """Whether the running forward is a training forward, not a comparison or a probe."""
        return torch.is_grad_enabled() and not self._is_comparing and not self.extension.engine.is_probing

    def _start_tiles(
        self, batch: PackedBatch, given: Mapping[str, Any], target_BT: Tensor, index_U: Tensor
    ) -> TiledRun | None:
        """Return a run of the head in tiles with the model's loss; None: use the plain head."""
        extension, place_R = self.extension, batch.place_R
        if not len(place_R):
            return None
        keeps, reading = self._is_comparing or (self._trains and extension.tiles.was_read), extension.scoring.reading
        if not torch.is_grad_enabled():
            keeps = reading is not None and reading.reads == "labels"
        return extension.tiles.start(
            index_U,
            batch.head_rows[1] if batch.layout.num_shared else None,
            labels_at(target_BT, place_R),
            partial(weigh_labels, self._model, target_BT, place_R, given),
            keeps=keeps,
        )

    def _try_last_layer(
        self,
        layout: PackedLayout,
        given: dict[str, Any],
        options: dict[str, Any],
        take: Callable[[Tensor], Tensor],
        before: Sequence[KeptRows],
    ) -> bool:
        """Return whether the head gets the same input if the last layer runs only the rows that are read.

        It does not if a model runs its layers repeatedly, calls attention twice in one, or reshapes their output.
        """
        extension, head = self.extension, self.extension.head
        options = {name: value for name, value in options.items() if name != ARGUMENT}
        assert head is not None
        if find_reentrant(self._model) is not None:  # see LastLayer
            return False

        def run(*, shortens: bool) -> Tensor:
            found: list[Tensor] = []

            def keep(hidden: Tensor) -> Tensor:
                found.append(take(hidden))
                return hidden

            with torch.no_grad(), keeping_buffers(self._model), replace_forwards([(head, keep)]):
                extension.run_rows(
                    layout,
                    given,
                    lambda taken: call_module(self._model, **options | taken),
                    shortens=shortens,
                    before=before,
                )
            return found[0]

        whole, last = run(shortens=False), extension.last_layer
        assert last is not None
        last.num_calls = extension.calls_of_layer
        for skips, spreads in last.ways:
            last.skips, last.spreads = skips, spreads
            try:
                short = run(shortens=True)
            except Exception:  # a layer that cannot do it may raise anything
                continue
            if bool((short - whole).norm() <= limit_of(self._model) * whole.norm()):
                return True
        return False

    def _compute_fused(
        self,
        batch: PackedBatch,
        given: dict[str, Any],
        options: dict[str, Any],
        row_R: Tensor,
        before: Sequence[KeptRows],
    ) -> Any:
        extension = self.extension
        options = options | {"num_items_in_batch": given.get("num_items_in_batch")}

        def run(shift_labels: Tensor) -> Any:
            run_model = partial(self.run_covered, self._model, **options, shift_labels=shift_labels)
            return extension.run_rows(
                batch.layout, given, lambda taken: run_model(**taken), before=before, count_N=batch.count_N
            )

        target_BT = find_targets(given)
        assert target_BT is not None
        return run_fused(extension.stack, batch, row_R, target_BT, run, partial(self._take, batch, before))


def _copy_computed(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return detached copies of the inputs that have a gradient, since the graph behind them belongs to the script."""
    found = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.requires_grad}
    return {name: value.detach().clone().requires_grad_() for name, value in found.items()}


def _spread_first(stack: nn.Module, batch: PackedBatch) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Return a replacement for an encoder's pooler, which reads the first position of each example."""
    pooler = getattr(stack, "pooler", None)
    if not isinstance(pooler, nn.Module):
        return []
    covered = pooler.__dict__.get("forward") or partial(call_module, pooler)

    def run(hidden: Tensor) -> Any:
        if hidden.shape[:2] != (1, batch.layout.num_rows):
            raise UnsupportedError(
                f"lossless does not support {type(stack).__name__}, which passes only some positions to its pooler"
            )
        return covered(batch.layout.spread(hidden[0]))

    return [(pooler, run)]


def _changed(output: Any, **changes: Tensor | tuple[Tensor | None, ...] | None) -> Any:
    """Return a copy of a transformers output with changed values, without fields in the shape of the packed rows."""
    return replace(output, **changes, **{name: None for name in CACHE_NAMES if name in vars(output)})
