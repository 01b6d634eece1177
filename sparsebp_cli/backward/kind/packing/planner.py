"""Planning of packed batches: chooses and arranges the rows of each batch, and decides which batches to compare.

Shape letters: B examples, T positions, N computed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from sparsebp_cli.backward.decoder.decoder import argument_names, find_reentrant, is_pretrained
from sparsebp_cli.backward.isolation import Examples, examples_at
from sparsebp_cli.backward.kind.fused_head import ARGUMENT, has_fused_head
from sparsebp_cli.backward.kind.packing.attention import LAYOUT, AttentionRule, Switch, ask_rule, packed
from sparsebp_cli.backward.kind.packing.balance import (
    OPTION,
    balances_experts,
    count_positions,
    find_coefficient,
)
from sparsebp_cli.backward.kind.packing.batch import (
    BATCH,
    SHIFTED,
    STATES,
    BatchFacts,
    Counts,
    NeededRows,
    PackedBatch,
    find_before,
    find_labelled,
    find_places,
    has_weights,
    read_mask,
    read_positions,
    to_host,
    to_place,
)
from sparsebp_cli.backward.kind.packing.dropout import AdapterDropout, LaterDropout
from sparsebp_cli.backward.kind.packing.groups import Bools
from sparsebp_cli.backward.kind.packing.head import count_rows
from sparsebp_cli.backward.kind.packing.last_layer import LastLayer, find_shares
from sparsebp_cli.backward.kind.packing.layout import PackedLayout, make_layout
from sparsebp_cli.backward.kind.packing.mixer import find_mixers
from sparsebp_cli.backward.kind.packing.packed_model import PackedModel
from sparsebp_cli.backward.kind.packing.pair import ARGUMENTS, PairPacking, is_pair
from sparsebp_cli.backward.kind.packing.prompt import SoftPrompt
from sparsebp_cli.backward.kind.packing.refusal import (
    find_head,
    find_model,
    find_text,
    is_attention,
    reads_first,
    refuse_batch,
    refuse_inexact,
)
from sparsebp_cli.backward.kind.packing.remembered import LastLayout
from sparsebp_cli.backward.kind.packing.scoring import Scoring
from sparsebp_cli.backward.kind.packing.sequence import SEQUENCES, find_begins, find_needed, refuse_bounds
from sparsebp_cli.backward.kind.packing.tiled_head import TiledHead
from sparsebp_cli.backward.kind.packing.update import Collected, HeldRows, KeptRows, UpdatePlan
from sparsebp_cli.backward.kind.packing.verify import Check, Comparisons
from sparsebp_cli.backward.kind.packing.weight import DeadExamples
from sparsebp_cli.backward.observe.internals import find_switches
from sparsebp_cli.backward.patch.forward import (
    ForwardPatches,
    check_free,
)
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import BatchPacker, PackedSize

_NOTHING_SEEN = "no training batch went through {}: call the whole model, since lossless does not act in its parts"
_EVAL_MODE = "{} is in eval mode, as from_pretrained returns it, so lossless is off: call model.train() before the loop"


class PackingPlanner(PackedModel):
    """Arranges the rows of the batches of one model, and runs them.

    Raises :class:`UnsupportedError` if skipping rows would change this model's gradient.
    """

    stack: nn.Module
    counts: Counts
    prompt: SoftPrompt | None
    scoring: Scoring

    def __init__(self, policy: BatchPacker, model: nn.Module) -> None:
        self.policy, self.model = policy, find_model(model)
        self.stack = self.model.base_model
        self.pair = PairPacking(policy, self.model) if is_pair(self.model) else None
        self.head = self.model.get_output_embeddings() if self.pair is not None else find_head(self.model)
        self._prefix = next((f"{name}." if name else "") for name, m in model.named_modules() if m is self.model)
        refuse_inexact(self.model, policy.verify)
        # The only foreign forward that packing supports is trl's.
        if not has_fused_head(self.model):
            check_free("the model", self.model)
        check_free("the base model", self.stack)
        self._reads_first = reads_first(self.model)
        self.prompt = SoftPrompt.find(model)
        self.dropout = AdapterDropout(self.stack)
        self.later_dropout = LaterDropout(self.model, self.dropout.modules)
        self._switch = Switch(self.model)
        self._switch.refuse_unknown()
        self._patches = ForwardPatches()
        self._text = find_text(self.model)
        self._attention_layers = sum(map(is_attention, self._text.modules()))
        if not self._attention_layers:
            raise UnsupportedError(f"{type(self.model).__name__} has no attention layers that lossless supports")
        self.is_causal: bool | None = None  # whether attention is causal; None before the first forward
        self._rules: dict[tuple[bool, bool], AttentionRule] = {}  # by (uses a cache, uses checkpointing)
        self.counts, self.failure = Counts(), ""
        self.comparisons = Comparisons(policy.verify, self.counts)
        self.last: PackedBatch | None = None
        self._shares = find_shares(self._text, self.head)
        self.calls_of_layer = 1  # attention calls in one layer, counted in the last packed forward
        self.last_layer: LastLayer | None = None  # None: it runs all rows
        self.shortens: bool | None = None  # whether the last layer runs only rows that are read; None: not tried yet
        self.given_labels: Tensor | None = None
        self.layouts, self.scoring, self.dead = LastLayout(make_layout), Scoring(self), DeadExamples()
        # The first comparison runs the plain step, which holds all logits. So the first batch may keep the logits of
        # its tiles, in case the script reads logits after each update.
        head, compares = None if self.pair is not None else self.head, policy.verify != "never"
        self.tiles = TiledHead(self.model, head, policy.logits, was_read=compares)
        self.trains = True  # False for a reference: its forwards with a gradient run plainly
        self._updates: dict[bool, UpdatePlan] = {}  # plans of the current step (False) and of a probe (True)
        self._ran: list[PackedBatch] = []  # the batches of the last update that was announced, as far as it ran
        self._ran_plainly: list[tuple[int, int]] = []
        self._num_expected, self._expects_probe = 0, False
        self._ran_held: list[PackedLayout] = []  # layouts of the held rows that ran before them
        self._held = HeldRows()

    @cached_property
    def mixers(self) -> list[nn.Module]:
        """Layers that mix neighbouring positions, and continue a text from states."""
        return find_mixers(self._text)

    @property
    def known_arguments(self) -> frozenset[str]:
        """Arguments of the forward that only this model supports, besides the common ones."""
        if self.pair is not None:
            return frozenset(ARGUMENTS)
        balances = self.head is not None and find_coefficient(self.model) is not None
        return SEQUENCES | {STATES} | ({OPTION} if balances else set()) | (set() if self.head is None else {SHIFTED})

    def plan(
        self,
        inputs: Mapping[str, Any],
        read_BT: Bools | None,
        *,
        whole: bool = False,
        counts: Counts | None = None,
    ) -> PackedBatch | None:
        """Arrange the rows of a batch; None if packing saves nothing and the plain forward returns the same.

        ``read_BT`` marks the positions that the caller reads; None: all positions but padding. ``whole`` arranges rows
        even if none is skipped; so does a head in tiles, which saves memory. ``counts`` counts a refused batch; None:
        the counts of training.
        """
        rows = self._find_rows(inputs, read_BT, counts, reads_first_label=not whole)
        if rows is None:
            return None
        first = next(inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
        most_read = self.most_read
        layout = self.layouts.make(
            rows.needed_BT,
            rows.token_BT,
            rows.position_BT,
            first.device,
            is_causal=self.is_causal is not False,
            place_BT=rows.place_BT,
            alone_BT=rows.alone_BT,
            begins_BT=rows.begins_BT,
            read_BT=None if most_read is None or rows.balances or rows.states else rows.read_BT,
            most_read=most_read or 0.0,
        )
        batch = self._to_batch(rows, layout)
        head_rows = int(rows.read_BT.sum()) if self.head is not None else rows.needed_BT.size
        last_rows = layout.num_rows if layout.read is None else len(layout.read.row_M)
        packed_size = PackedSize(rows.needed_BT.size, layout.num_rows, head_rows, last_rows, *self._shares)
        if whole or self.policy.packs(packed_size) or self._has_tiles(batch, inputs):
            return batch
        # Packing keeps texts of a row independent, so do it in all batches of a training, even without savings.
        return batch if rows.begins_BT is not None and self._mixes(inputs) else None

    def _has_tiles(self, batch: PackedBatch, inputs: Mapping[str, Any]) -> bool:
        """Return whether the head of a batch runs in tiles, which the model's own forward does not support."""
        computes_loss = inputs.get("labels") is not None and not inputs.get(ARGUMENT)
        return self.head is not None and computes_loss and bool(self.tiles.size_of(count_rows(batch)))

    @property
    def most_read(self) -> float | None:
        """The largest fraction of rows that are read at which the last layer runs only these; None: it runs all."""
        return None if self.last_layer is None or self.shortens is False else self.last_layer.most_read

    def _to_batch(self, rows: NeededRows, layout: PackedLayout) -> PackedBatch:
        padding = int((~(rows.real_BT | rows.alone_BT)).sum())
        unread = int((rows.real_BT & ~rows.needed_BT).sum())
        place = to_place(rows.read_BT, layout.source_N.device)
        count = count_positions(layout, rows.real_BT) if rows.balances else None
        empty_B = np.asarray(~rows.real_BT.any(1))
        if empty_B.any():  # an empty example has a row, but it differs from the plain one, which attends to padding
            computed_BT = layout.host.computed_BT & (~empty_B[:, None] | rows.alone_BT)
            layout = layout.change(layout.host.row_BT, computed_BT, layout.num_shared)
        return PackedBatch(layout, *place, padding, unread, facts=rows.facts, count_N=count)

    def _find_rows(
        self,
        inputs: Mapping[str, Any],
        read_BT: Bools | None,
        counts: Counts | None = None,
        *,
        reads_first_label: bool = False,
    ) -> NeededRows | None:
        """Return the positions of a batch to compute; None if none can be skipped, with the reason in ``counts``.
        ``reads_first_label``: the script's own loss reads the left padding that predicts the first label, although the
        script did not declare it."""
        first = next(inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
        size = (int(first.shape[0]), int(first.shape[1]))
        on_host = to_host(inputs, size)
        real, position = read_mask(on_host, size), read_positions(self.stack, on_host, size)
        if real is None or position is None:
            return None
        # Do not wait for the first packed mask: if each text has one position, no position in it looks ahead.
        if self.is_causal is None and self.pair is None and self._rule(uses_cache=False).looks_ahead:
            self.is_causal = False
        causal = self.is_causal is not False
        if not causal and self._reads_first and not real[:, 0].all():
            self.engine.notes["first position"] = (
                "lossless skips nothing in batches that are padded on the left, because a module above the layers "
                "reads the first position: pad on the right"
            )
            return None
        read = real if read_BT is None else read_BT
        takes_padding = causal and self._switch.zeroes_padding
        if read_BT is None and self.head is not None and takes_padding and reads_first_label:
            read = real | find_before(real)
        # Only causal masks are split where position numbers restart.
        begins = find_begins(inputs, position, self._holds_texts) if causal else None
        facts = BatchFacts.of(inputs, real, read, position, begins)
        alone = read & ~real  # padding that is trained: the first token's label, with padding on the left
        if alone.any() and not takes_padding:
            return None
        # The loss that balances experts reads the routers at every position that is not padding.
        balances = self.head is not None and balances_experts(self.model, inputs)
        states = self.returns_states(inputs)
        needed = self._needed(real, real if balances or states else read, alone, begins, causal=causal)
        reason = refuse_bounds(inputs, begins, size, causal=causal)
        if self.mixers and (begins is not None or facts.has_gaps):
            reason = "layers of this model mix neighbouring positions, even across packed texts and gaps in a text"
        if (self.mixers or balances) and has_weights(on_host):
            reason = "this model multiplies by the attention mask, which has values other than 0 and 1"
        if reason := reason or refuse_batch(self.model, facts, int(position[needed | alone].max())):
            (self.counts if counts is None else counts).refuse(reason)
            return None
        ids = on_host.get("input_ids")
        # The comparison of prefixes ignores token types, so with token types examples share no prefixes.
        shares = causal and self.policy.prefixes != "separate" and inputs.get("token_type_ids") is None
        shares = shares and not self.dropout  # in the plain step, equal positions of two examples have different masks
        tokens = ids.cpu().numpy() if shares and ids is not None else None
        if shares and ids is None and self.prompt is not None:
            tokens = self.prompt.find_tokens(inputs)
        places = find_places(real, position, begins)
        return NeededRows(needed, tokens, position, places, real, read, alone, begins, facts, balances, states)

    @override
    def expect(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Arrange the rows of the coming micro-batches together; return whether micro-batches share rows."""
        self.drop_update()
        if self.policy.prefixes != "update":
            return False
        self._ran, self._ran_held, self._ran_plainly = [], [], []
        self._num_expected, self._expects_probe = len(batches), self.engine.is_probing
        is_known = self.head is not None and self.pair is None and self.prompt is None and not self.dropout
        if not is_known or self.failure or self.is_causal is False:
            return False
        # States of other micro-batches are not held, and under reentrant checkpointing keys and values have no graph.
        is_reentrant = find_reentrant(self.model) is not None
        if self.mixers or is_reentrant:
            self._held.refused = "reentrant checkpointing" if is_reentrant else "layers that mix neighbouring positions"
            return False
        # Under trl's fused head, examples of weight zero run as a separate batch without gradient.
        parts = [self.dead.find_trained(batch) if batch.get(ARGUMENT) else None for batch in batches]
        batches = [batch if part is None else part for batch, part in zip(batches, parts, strict=True)]
        read = [find_labelled(batch) for batch in batches]
        rows = [self._find_rows(batch, read_BT, Counts()) for batch, read_BT in zip(batches, read, strict=True)]
        found = [one for one in rows if one is not None and one.token_BT is not None]
        if len(found) < len(rows) or any(one.alone_BT.any() or one.begins_BT is not None for one in found):
            self._held.unfit += not self.engine.is_probing
            return False
        if any(one.balances for one in found):  # a loss over the positions of each micro-batch, shared ones included
            self._held.refused = "the loss that balances experts"
            return False
        update = UpdatePlan(found, batches)
        if update.held:
            self.dead.is_announced = any(part is not None for part in parts)
            self._updates[self.engine.is_probing] = update
        if not self.engine.is_probing:
            self._held.add(update)
        return bool(update.held)

    @property
    def update(self) -> UpdatePlan | None:
        """The plan of the current update, if any."""
        return self._updates.get(self.engine.is_probing) if self._updates else None

    def drop_update(self) -> None:
        """Delete the plan of an update."""
        update, self.dead.is_announced = self._updates.pop(self.engine.is_probing, None), False
        if update is not None:
            update.drop()

    def plan_of_update(self, inputs: Mapping[str, Any], read_BT: Bools | None) -> PackedBatch | None:
        """Return a forward's rows from the plan of its update; None without a plan, or if the forward is not in it."""
        update = self.update
        number = None if update is None else update.find(inputs)
        if update is None or number is None:
            return None
        rows = update.batches[number].rows
        read = rows.real_BT if read_BT is None else read_BT
        switches = find_switches(self.model)
        update.switches = update.switches or switches
        fits = switches == update.switches and not (read & ~rows.read_BT).any()
        if not fits or self.returns_states(inputs):  # held rows do not store these outputs
            update.withdraw(number)
            self._held.alone += 1
            return None
        first = next(inputs[name] for name in BATCH if inputs.get(name) is not None)
        layout = update.arrange(number, first.device, self.most_read)
        held = [update.held[segment] for segment in update.held_of(number)]
        opened = sum(one.size for one in held if one.users[0] == number)
        layout = replace(layout, num_shared=layout.num_shared - opened)
        return replace(self._to_batch(replace(rows, read_BT=read), layout), number=number)

    def add_run(self, batch: PackedBatch) -> None:
        """Record a batch, if it belongs to the update that :meth:`expect` announced."""
        if self._is_expected():
            self._ran.append(batch)

    def add_plain_run(self, size: torch.Size) -> None:
        """Record a batch (B, T) that ran plainly, if it belongs to that update."""
        if self._is_expected():
            self._ran_plainly.append((size[0], size[1]))

    def _is_expected(self) -> bool:
        num_ran = len(self._ran) + len(self._ran_plainly)
        return num_ran < self._num_expected and self._expects_probe == self.engine.is_probing

    def add_held(self, layout: PackedLayout) -> None:
        """Record held rows, which ran before the batches that share them."""
        self._ran_held.append(layout)

    @override
    def finish_pass(self) -> None:
        """Run the backward of held rows after the backward of their last micro-batch."""
        update = self.update
        if update is not None and update.finish():
            self.drop_update()
        elif update is not None:
            update.note_gradients(self.model.parameters())

    def find_examples(self, inputs: dict[str, Any]) -> Examples:
        """Return the examples of a planned batch, with the sequences of one row separated. They may begin at any
        position, so they keep the batch's position numbers and mask, if any."""
        first = next(inputs[name] for name in BATCH if inputs.get(name) is not None)
        size = (int(first.shape[0]), int(first.shape[1]))
        real, position = read_mask(inputs, size), read_positions(self.stack, inputs, size)
        assert real is not None
        assert position is not None
        causal = self.is_causal is not False
        begins = find_begins(inputs, position, self._holds_texts) if causal else None
        return examples_at(inputs, torch.from_numpy(real), None if begins is None else torch.from_numpy(begins))

    def returns_states(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the forward returns the hidden states of its layers."""
        given = inputs.get(STATES)
        return bool(getattr(self.model.config.get_text_config(), STATES, False) if given is None else given)

    def _holds_texts(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether a row whose position numbers restart contains several texts."""
        return not self.uses_cache(inputs) or self._rule(uses_cache=True).splits is True

    def _mixes(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether texts of a row influence each other in the plain forward, as in OPT."""
        return self._rule(uses_cache=self.uses_cache(inputs)).splits is False

    def _rule(self, *, uses_cache: bool) -> AttentionRule:
        key = uses_cache, self._is_checkpointed()
        if key not in self._rules:
            self._rules[key] = ask_rule(self.stack, uses_cache=uses_cache)
        return self._rules[key]

    def uses_cache(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the plain forward makes a key/value cache."""
        given = False if inputs.get(ARGUMENT) else inputs.get("use_cache")  # trl's fused head makes no cache
        if given is None:
            given = getattr(self.model.config.get_text_config(), "use_cache", False)
        # Under checkpointing transformers makes a cache only without gradients. Texts are independent there, too, as in
        # the training forward to which such scores belong.
        return bool(given) and not self._is_checkpointed()

    def _is_checkpointed(self) -> bool:
        """Return whether a model checkpoints all of its layers in training. In some models they are two levels down."""
        return any(
            getattr(module, "gradient_checkpointing", False) and module.training
            for module in self.stack.modules()
            if is_pretrained(module)
        )

    def _needed(
        self, real_BT: Bools, read_BT: Bools, alone_BT: Bools, begins_BT: Bools | None, *, causal: bool
    ) -> Bools:
        """Return the positions to compute, at least one for each example."""
        needed = real_BT.copy()
        if causal and self.policy.labels:
            needed &= find_needed(read_BT, begins_BT)
        empty = ~(needed | alone_BT).any(1)
        needed[empty, np.where(real_BT[empty].any(1), real_BT[empty].argmax(1), 0)] = True
        return needed & ~alone_BT

    def note(self, check: Check | None = None, batch: PackedBatch | None = None) -> None:
        """Write the counts and the result of a batch's comparison into the report."""
        if check is not None:
            self.comparisons.count(check)
            if not check.passed and batch is not None:
                self.refuse(batch, check.describe())
        if not self.trains:
            return
        nothing = (_NOTHING_SEEN if self.model.training else _EVAL_MODE).format(type(self.model).__name__)
        seen = self.counts.describe() + self.dead.note + self.tiles.note if self.counts.batches else nothing
        self.engine.notes["packing"] = self.failure or seen
        if self.policy.prefixes == "update" and not self.failure:
            self.engine.notes["packing of updates"] = self._held.describe()

    def refuse(self, batch: PackedBatch, reason: str) -> None:
        """Run batches of this kind plainly. With ``prefixes: update`` run all plainly, since batches share rows."""
        if self.policy.prefixes == "update":
            self.failure = f"{reason}: lossless is off from here on"
        self.comparisons.failed[batch.signature] = reason

    def count(self, batch: PackedBatch, counts: Counts) -> None:
        """Count a packed batch, with the rows that the head and the last layer ran."""
        read = batch.layout.read if self.shortens else None
        counts.add(batch, 0 if self.head is None else count_rows(batch), None if read is None else len(read.row_M))

    def run_rows(
        self,
        layout: PackedLayout,
        inputs: Mapping[str, Any],
        run: Callable[[dict[str, Any]], Any],
        *,
        shortens: bool | None = None,
        before: Sequence[KeptRows] = (),
        keeps: Collected | None = None,
        count_N: Tensor | None = None,
    ) -> Any:
        """Call ``run`` with the base model's arguments for the rows of a layout.

        ``shortens``: whether the last layer runs only rows that are read; None: if a test showed that this is right.
        ``before`` are rows that other micro-batches of the update computed. ``keeps`` collects keys and values of the
        rows. ``count_N`` is the number of positions of each row; None: one.
        """
        names = argument_names(self.stack if self.head is None else self.model)  # of what ``run`` calls
        taken: dict[str, Any] = {
            name: inputs[name].flatten(0, 1).index_select(0, layout.source_N)[None]
            for name in BATCH
            if inputs.get(name) is not None
        }
        taken["position_ids"] = layout.position_N[None]
        # If it receives a mask, transformers does not search the position numbers for packed examples.
        count_N = torch.ones_like(layout.position_N) if count_N is None else count_N
        taken["attention_mask"] = count_N[None]
        taken = {name: value for name, value in taken.items() if name in names}
        taken |= {LAYOUT: layout} if self.mixers else {}
        short, keys = bool(self.shortens) if shortens is None else shortens, [rows.keys for rows in before]
        with packed(layout, shortens=short, before=keys, keeps=keeps) as state:
            output = run(taken)
        self.check_calls(state.num_calls)
        return output

    def check_calls(self, num_calls: int) -> None:
        """Raise :class:`UnsupportedError` if attention layers did not run through transformers' interface, and
        :class:`UsageError` if the script has set another attention implementation."""
        if self._switch.is_changed:
            raise UsageError(
                "the attention implementation was changed after the model was attached: call engine.detach(), change "
                "the implementation, and attach the model again"
            )
        if not num_calls or num_calls % self._attention_layers:
            raise UnsupportedError(
                f"lossless needs one call of transformers' attention interface for each attention layer, but "
                f"{type(self.model).__name__} has {self._attention_layers} layers and made {num_calls} calls"
            )
        self.calls_of_layer = num_calls // self._attention_layers
