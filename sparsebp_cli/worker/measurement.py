"""Take measurements between training steps without changing the run: the probe, its proof, and fidelity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import Engine, Fidelity, GradientComparison, Proof
from sparsebp_cli.backward.core.report import Report, SiteReport
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.proof.proof import COLUMNS, Overclaim, kept_share
from sparsebp_cli.policy import Policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, metric
from sparsebp_cli.worker.peak_memory import PeakMemory
from sparsebp_cli.worker.price import Shape, StepPrice
from sparsebp_cli.worker.probe import count_price, price_pass, run_probe
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sgd_noise import Half, measure_sgd_variance
from sparsebp_cli.worker.step_cost import RelativeCost
from sparsebp_cli.worker.stopwatch import Stopwatch
from sparsebp_cli.worker.trial_step import PassResult, RestOfUpdate, TrialStep

Values = dict[str, float | None]
ROUNDING = 1e-8  # squared error over squared norm; below it a policy computes the dense gradient


@dataclass
class Measurement:
    """Takes the measurements of a run at the steps that its recipe names. ``backward`` differentiates a loss without
    the engine. Memory of measurements does not count towards ``peak``. ``price`` receives the counts."""

    recipe: Recipe
    journal: JournalWriter
    model: nn.Module
    engine: Engine
    backward: Callable[[Tensor], None]
    device: torch.device
    peak: PeakMemory
    price: StepPrice
    ranks: Ranks = field(default_factory=Ranks)
    rest: Callable[[], RestOfUpdate] = RestOfUpdate  # of the coming step, after its first micro-batch
    _layers: LayerNumbers = field(init=False)
    _proofs: dict[int, dict[str, list[float | None]]] = field(init=False)  # tables in the event log, by step
    _judged: bool = False
    _judged_idle: bool = False
    _noted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._layers = LayerNumbers(self.model)
        proofs = History.load(self.journal.path.parent).proofs
        self._proofs = {step: proof["modules"] for step, proof in proofs.items()}

    def measure_cost(
        self, forward: Callable[[], Tensor], shape: Callable[[], Shape], policies: Sequence[Policy]
    ) -> RelativeCost:
        """Measure before training what a step costs. ``forward`` returns the loss of the first micro-batch, ``shape``
        is as in :meth:`before`, and ``policies`` are the attached policies."""
        self.peak.pause()
        with TrialStep(self.model, self.engine, forward, self.backward, self.rest()) as trial:
            probe = run_probe(trial, Stopwatch(self.device))
        self.price.see_probe(price_pass(probe.proof, shape()), probe.kind)
        self.peak.resume()
        return RelativeCost.of(probe, policies)

    def at_start(self, forward: Callable[[], Tensor], shape: Callable[[], Shape], policies: Sequence[Policy]) -> Values:
        """Measure a step before training, if the run has probes. Note it in the event log and return its metrics."""
        if self.recipe.measure.probe_every is None:
            return {}
        cost = self.measure_cost(forward, shape, policies)
        if line := cost.describe():
            self.journal.write("note", level="info", text=line)
        return cost.metrics()

    @property
    def _is_limited(self) -> bool:
        """Whether the cost of each step decides when the run ends."""
        return self.recipe.training.max_flops is not None

    def _count(self, step: int, forward: Callable[[], Tensor], shape: Callable[[], Shape]) -> None:
        """Count the work of a step if it is due. Probes do not suffice: their random draws differ."""
        before = self.price.counted
        if before is None or self.recipe.measure.probe_every is None:
            return  # a restored price may exist where nothing can be counted, as with sharded parameters
        # Counts differ between processes, and a pass waits for all of them.
        if not any(self.ranks.all_max([float(self.price.is_due(step, is_limited=self._is_limited))])):
            return
        self.peak.pause()
        with TrialStep(self.model, self.engine, forward, self.backward, self.rest()) as trial:
            self.price.count(*count_price(trial, shape(), before), step)
        self.peak.resume()

    def before(
        self,
        step: int,
        forward: Callable[[], Tensor],
        shape: Callable[[], Shape],
        halves: Callable[[], Sequence[Half]] | None = None,
    ) -> Values:
        """Return the metrics of the probe and of fidelity that are due before a step (from 1). ``shape`` returns the
        shape of a trial's input, the first micro-batch or all of them. With ``halves`` of the micro-batch, compare the
        policy's error with the noise of dense."""
        measure = self.recipe.measure
        probe_due, fidelity_due = (self._is_due(step, every) for every in (measure.probe_every, measure.fidelity_every))
        self._count(step, forward, shape)
        if not (probe_due or fidelity_due):
            return {}
        values: Values = {}
        self.peak.pause()
        with TrialStep(self.model, self.engine, forward, self.backward, self.rest()) as trial:
            dense = policy = fidelity = None
            if probe_due:
                probe = run_probe(trial, Stopwatch(self.device))
                dense, policy, values = probe.dense, probe.policy, probe.values
                if not (self._is_limited and self.price.due):
                    self.price.see_probe(price_pass(probe.proof, shape()), probe.kind)
                self._judge(step, probe.proof)
                self._write_proof(step, probe.proof.table())
            if fidelity_due:
                dense, policy = dense or trial.run("dense"), policy or trial.run("policy")
                fidelity = self._compare(trial, dense, policy)
                overall = fidelity.overall()
                values |= _fidelity_values(overall)
                if halves is not None and (overall.squared_error or 0.0) > ROUNDING:
                    values |= _noise_values(overall, measure_sgd_variance(trial, dense.gradients, halves()))
            assert policy is not None
            self.journal.write("layers", step=step, values=self._layer_values(policy.report, fidelity))
        self.peak.resume()
        return values

    def note(self) -> None:
        """Write the engine's new notes to the event log."""
        for key, text in self.engine.notes.items():
            if key not in self._noted:
                self.journal.write("note", level="info", text=text)
        self._noted.update(self.engine.notes)

    def _write_proof(self, step: int, table: dict[str, list[float | None]]) -> None:
        before = max((known for known in self._proofs if known <= step), default=None)
        if before != step and (before is None or table != self._proofs[before]):
            self._proofs[step] = table
            self.journal.write("proof", step=step, values={"columns": COLUMNS, "modules": table})

    def _is_due(self, step: int, every: int | None) -> bool:
        """Return whether a measurement is due: at its interval, and once after warm-up, so that short runs have one."""
        return every is not None and (step % every == 0 or step == self.recipe.measure.warmup_steps + 1)

    def _compare(self, trial: TrialStep, dense: PassResult, policy: PassResult) -> GradientComparison:
        draws = self.recipe.measure.fidelity_draws
        comparison = GradientComparison(dense.gradients, self._layers.part_of, num_draws=draws)
        comparison.add_draw(policy.gradients)
        for draw in range(2, draws + 1):
            comparison.add_draw(trial.run("policy", draw).gradients)
            if not comparison.is_random:
                break  # a deterministic policy: all further draws are equal
        return comparison

    def _layer_values(self, report: Report, fidelity: GradientComparison | None) -> dict[str, dict[str, float | None]]:
        kept = _kept_by_part(report, self._layers)
        parts: dict[str, Fidelity] = {} if fidelity is None else fidelity.by_part()
        nothing = Fidelity(None, None)
        return {
            part or "(model)": {
                "kept_share": _short(kept.get(part)),
                "cosine": _short(parts.get(part, nothing).cosine),
                "relative_error": _short(parts.get(part, nothing).relative_error),
                "sign_agreement": _short(parts.get(part, nothing).sign_agreement),
            }
            for part in [*parts, *(part for part in kept if part not in parts)]
        }

    def _judge(self, step: int, proof: Proof) -> None:
        """Warn once a run if the policy skipped less than it claimed, and once an attempt if it decided nothing."""
        sites = proof.report.sites
        if sites and not self._judged_idle and len(proof.report.never_called) == len(sites):
            text = f"no gradient reached any of the policy's {len(sites)} sites, so the policy had no effect"
            self.journal.write("note", level="warning", text=text)
            self._judged_idle = True
        overclaim = None if self._judged else proof.find_overclaim()
        if overclaim is None:
            return
        self._judged = True
        if "overclaim" in History.load(self.journal.path.parent).facts:  # an earlier attempt reported it
            return
        by_choice = self.recipe.backward.execution == "reference"
        fact = vars(overclaim) | {"step": step, "num_sites": len(overclaim.sites), "sites": overclaim.sites[:3]}
        self.journal.write("facts", values={"overclaim": fact | {"by_choice": by_choice}})
        text = _overclaim_message(overclaim, step, len(sites))
        why = "; this is expected, because backward.execution: reference computes every product" if by_choice else ""
        self.journal.write("note", level="info" if by_choice else "warning", text=text + why)


def _overclaim_message(overclaim: Overclaim, step: int, num_sites: int) -> str:
    where = ""
    if overclaim.sites:
        where = f", at {len(overclaim.sites)} of {num_sites} sites, most at {overclaim.sites[0]}"
    return (
        f"the policy estimates {overclaim.claimed_share:.1%} of the dense backward FLOPs at its sites, but "
        f"{overclaim.executed_share:.1%} were counted (step {step}{where})"
    )


def _kept_by_part(report: Report, layers: LayerNumbers) -> dict[str, float | None]:
    sites: dict[str, list[SiteReport]] = {}
    for site in report.sites:
        sites.setdefault(layers.part_of(site.name), []).append(site)
    return {part: kept_share(some) for part, some in sites.items()}


def _fidelity_values(fidelity: Fidelity) -> Values:
    return {
        metric.COSINE.name: fidelity.cosine,
        metric.RELATIVE_ERROR.name: fidelity.relative_error,
        metric.SIGN_AGREEMENT.name: fidelity.sign_agreement,
        metric.BIAS.name: fidelity.bias,
        metric.BIAS_STANDARD_ERROR.name: fidelity.bias_standard_error,
        metric.VARIANCE.name: fidelity.variance,
    }


def _noise_values(fidelity: Fidelity, sgd_variance: float | None) -> Values:
    error = fidelity.squared_error
    ratio = error / sgd_variance if error is not None and sgd_variance else None
    return {metric.SGD_VARIANCE.name: sgd_variance, metric.NOISE_RATIO.name: ratio}


def _short(value: float | None) -> float | None:
    """Round to six significant digits, so that the event log of a model with many layers stays small."""
    return None if value is None else float(f"{value:.6g}")
