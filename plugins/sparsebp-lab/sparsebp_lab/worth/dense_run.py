"""Run the dense training at whose points policies are measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.observe.update_flops import UpdateFlops
from sparsebp_cli.policy import Policy, make_policy
from sparsebp_cli.worker.batch import IN_PLACE, num_targets
from sparsebp_cli.worker.policy import attach_policies, set_columns
from sparsebp_cli.worker.price import find_updated
from sparsebp_cli.worker.probe import count_work
from sparsebp_cli.worker.training import Training
from sparsebp_cli.worker.trial_step import TrialStep, trainable_parameters

Report = Callable[[str, int, int], None]


class DenseRun:
    """The dense training at whose points policies are measured."""

    def __init__(self, training: Training, report: Report, total: int) -> None:
        self.training, self._report, self._total, self.done = training, report, total, 0
        self.step, self.update_flops, self.per_entry = 0, 0.0, 0.0
        self.has_moments = False
        self._dense_flops: dict[object, dict[int, float]] = {}  # by the shapes of a micro-batch, and its number
        training.engine.detach()
        training.model.train()  # it is loaded in evaluation mode, without dropout or a choice of batches
        self.part_of = LayerNumbers(training.bare).part_of
        self._engine = self.attach([make_policy("dense")])
        self.names = trainable_parameters(training.bare, self._engine)

    def tell(self, what: str, passes: int) -> None:
        """Report the next phase, and how many passes are done."""
        self._report(what, self.done, self._total)
        self.done += passes

    def attach(self, policies: Sequence[Policy]) -> Engine:
        """Attach policies as if they had been attached since the first step."""
        training, recipe = self.training, self.training.plan.recipe
        engine = attach_policies(policies, recipe, training.bare, training.optimizer.optimizer, training.reference)
        engine.load_state_dict(engine.state_dict() | {"index": self.step})
        set_columns(training.order, policies, recipe, training.reference)
        return engine

    def train_to(self, step: int) -> None:
        """Train densely up to ``step``."""
        training, recipe = self.training, self.training.plan.recipe.training
        while self.step < step:
            self.tell(f"dense step {self.step + 1} of {step}", 1)
            first = self.step * recipe.gradient_accumulation_steps
            shares = [training.order.rank_part(n) for n in range(first, first + recipe.gradient_accumulation_steps)]
            targets = sum(count for _, count in shares)
            for batch, _ in shares:
                self._engine.backward(training.loss_of(batch, targets), training.accelerator.backward)
            counting = UpdateFlops()
            with counting:
                updated, _ = find_updated(training.optimizer, all_of_them=False)
                training.clip()
                training.optimizer.step()
            training.schedule.step()
            training.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.update_flops, self.per_entry = float(counting.flops), counting.flops / max(1, updated)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Detach the dense engine, so that others can be attached one after the other, and attach it again."""
        self._engine.detach()
        try:
            yield
        finally:
            self._engine = self.attach([make_policy("dense")])

    @contextmanager
    def attached(self, policies: Sequence[Policy]) -> Iterator[Engine]:
        """Attach policies while the dense run is paused, and detach them."""
        state = self.training.optimizer.optimizer.state
        before = {parameter: dict(values) for parameter, values in state.items()}
        try:
            engine = self.attach(policies)
            try:
                yield engine
            finally:
                engine.detach()
        finally:
            state.clear()  # policies that freeze parameters permanently drop their state
            state.update(before)

    def count_dense(self, engine: Engine, number: int) -> float:
        """Return the FLOPs of a dense forward and backward over a micro-batch. They are those of two others with the
        same shapes, if these two cost the same."""
        shapes = frozenset((name, tensor.shape) for name, tensor in self._first_of(number, None).items())
        counts = self._dense_flops.setdefault(shapes, {})
        if number not in counts and (len(counts) < 2 or len(set(counts.values())) > 1):
            with self.trial(engine, number) as trial:
                counts[number] = count_work(trial, "dense").flops
        return counts.get(number, min(counts.values()))

    def show_steps(self, engine: Engine, first: int, number: int) -> None:
        """Show ``number`` steps to policies with state, as if trained; weights and optimizer do not change."""
        training, micro_batches = self.training, self.training.plan.recipe.training.gradient_accumulation_steps
        for step in range(first, first + number):
            go_to(engine, step)
            self.run_trials(engine, step * micro_batches)
            shares = [training.order.rank_part(step * micro_batches + place) for place in range(micro_batches)]
            targets = sum(count for _, count in shares)
            with self.trial(engine, step * micro_batches):  # restores generators, buffers and gradients
                for batch, _ in shares:
                    engine.backward(training.loss_of(batch, targets), training.accelerator.backward)
                engine.states.end_step(engine.now())

    def run_trials(self, engine: Engine, first: int) -> None:
        """Run the trial passes that are due, on a micro-batch and later ones."""
        training = self.training
        batch, targets = training.order.rank_part(first)
        others = [
            partial(training.loss_of, training.order.rank_part(first + more)[0], targets)
            for more in range(1, engine.count_trial_batches())
        ]
        loss = partial(training.loss_of, batch, targets)
        engine.run_trials(loss, training.accelerator.backward, others=others)

    def trial(self, engine: Engine, number: int, most: int | None = None, *, trims: bool = False) -> TrialStep:
        """Return a trial step of a micro-batch, or of its first examples. They are padded as in the whole batch, since
        policies may choose padding; ``trims`` removes positions that are padding in all of them."""
        training, batch = self.training, self._first_of(number, most)
        batch = _trim(batch) if trims else batch
        targets = max(1, num_targets(batch, training.order.candidates))
        loss = partial(training.loss_of, batch, targets)
        return TrialStep(training.bare, engine, loss, training.accelerator.backward)

    def number_draws(self, number: int, most: int) -> int:
        """Return the number of a policy's first draw on the first examples of a micro-batch, from their values.
        Otherwise all batches and tasks would share a draw, and an unlucky one would distort all of them."""
        digest = hashlib.blake2b(digest_size=4)
        for tensor in self._first_of(number, most).values():
            digest.update(tensor.cpu().numpy().tobytes())
        return 1 + 2 * int.from_bytes(digest.digest(), "little")

    def _first_of(self, number: int, most: int | None) -> dict[str, Tensor]:
        return {name: tensor[:most] for name, tensor in self.training.order.rank_part(number)[0].items()}


def _trim(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch without last positions that are padding in each example."""
    mask_BT = batch.get("attention_mask")
    if mask_BT is None or IN_PLACE in batch:  # an encoder's inputs and a decoder's labels differ in length
        return batch
    length = int(mask_BT.any(0).nonzero().max()) + 1
    return {name: t[:, :length] if t.shape[:2] == mask_BT.shape else t for name, t in batch.items()}


def go_to(engine: Engine, step: int, micro_batch: int = 0) -> None:
    """Set the step and micro-batch of the next pass."""
    engine.load_state_dict(engine.state_dict() | {"index": step, "micro_batch": micro_batch})
