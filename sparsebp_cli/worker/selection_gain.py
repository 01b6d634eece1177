"""Measure, before training, a policy step's cost, the fraction it keeps, and what selection can gain.

This uses one forward (norms of the loss gradient at the head, ||softmax - onehot||), one dense backward (norms of
gradient rows at the sites), and a probe of dense and policy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.plan.selection_gain import SelectionGain, Unit, effective_share
from sparsebp_cli.policy import GradientSelector, Policy, Rows
from sparsebp_cli.run import metric
from sparsebp_cli.worker.data import IGNORED
from sparsebp_cli.worker.model import predicts_in_place
from sparsebp_cli.worker.probe import Probe, cost_ratio
from sparsebp_cli.worker.trial_step import TrialStep

ESS = {"targets": metric.TARGET_ESS, "examples": metric.EXAMPLE_ESS, "rows": metric.ROW_ESS}


@dataclass
class NormSums:
    """Sums of norms and of their squares, for the effective sample size."""

    total: float = 0.0
    squares: float = 0.0
    number: int = 0

    def add(self, norms: Tensor) -> None:
        """Add norms of any shape."""
        norms = norms.detach().double()
        self.total += float(norms.sum())
        self.squares += float(norms.square().sum())
        self.number += norms.numel()

    @property
    def effective(self) -> float | None:
        """Effective sample size over the number of norms, in (0, 1]; None if all norms are zero."""
        return effective_share(self.total, self.squares, self.number)


def head_norms(logits: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Yield for each example the norm ||softmax - onehot|| of each target's loss gradient with respect to its logits.
    Logits are (B, T, V) with labels (B, T), -100 where ignored; or (B, V) with labels (B,)."""
    for logits_of_one, labels_of_one in zip(logits, labels, strict=True):
        scores, wanted = logits_of_one[None], labels_of_one[None]
        if labels.ndim > 1:
            scores, wanted = logits_of_one[:-1], labels_of_one[1:]
        counts_N = wanted != IGNORED
        share_NV = scores[counts_N].float().softmax(-1)
        of_label_N = share_NV.gather(1, wanted[counts_N][:, None])[:, 0]
        yield (share_NV.square().sum(1) - 2.0 * of_label_N + 1.0).clamp(min=0.0).sqrt()


def head_ess(logits: Tensor, labels: Tensor) -> dict[Unit, float]:
    """Return the effective sample sizes of targets and examples by the norms of :func:`head_norms`. Units without
    gradient are left out. The norm of an example combines all its targets."""
    targets, examples = NormSums(), NormSums()
    for norms in head_norms(logits, labels):
        targets.add(norms)
        examples.add(norms.double().square().sum().sqrt())
    found: dict[Unit, float | None] = {"targets": targets.effective, "examples": examples.effective}
    return {unit: value for unit, value in found.items() if value is not None}


@dataclass
class RowNorms:
    """Norms of gradient rows at sites in one backward, by site. For a linear this is |x| |dy|, the norm of the row's
    weight gradient; otherwise |dy|."""

    sums: dict[str, NormSums] = field(default_factory=dict)

    @contextmanager
    def of(self, model: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Collect the norms at modules while a forward and a backward run inside."""
        handles = [model.get_submodule(name).register_forward_hook(self._make_hook(name)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def effective(self) -> float | None:
        """Median effective sample size over the sites; None if no gradient arrived."""
        found = [value for sums in self.sums.values() if (value := sums.effective) is not None]
        return statistics.median(found) if found else None

    def _make_hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def forward_hook(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor) or not first.requires_grad:
                return
            x_norm = _norms(inputs[0]) if isinstance(module, nn.Linear) and isinstance(inputs[0], Tensor) else None

            def gradient_hook(grad: Tensor) -> None:
                norms = _norms(grad)
                self.sums.setdefault(name, NormSums()).add(norms if x_norm is None else norms * x_norm)

            first.register_hook(gradient_hook)

        return forward_hook


def measure_selection_gain(
    trial: TrialStep,
    probe: Probe,
    batch: Mapping[str, Tensor],
    run: Callable[..., object],
    policies: Sequence[Policy],
) -> SelectionGain:
    """Measure what selection may gain on one micro-batch, on the device. The trial step must be entered, and the probe
    must be of the same micro-batch."""
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    with trial.on("dense"), torch.no_grad():
        # For encoder-decoders and masked language models, logits belong to other positions.
        logits = None if predicts_in_place(trial.model) else getattr(run(**arguments), "logits", None)
        effective = {} if logits is None else head_ess(logits, batch["labels"])
        # Free it before the passes below: it is often the largest tensor of all.
        del logits
    rows, modules = RowNorms(), dict(trial.model.named_modules())
    names = [site.name for site in probe.policy.report.sites if site.name in modules]
    names = names or [name for name, _, _ in find_linears(trial.model).covered]
    with trial.on("dense") as backward, rows.of(trial.model, names):
        backward(trial.forward())
    if rows.effective is not None:
        effective["rows"] = rows.effective
    unit, share = find_selected_share(probe, policies)
    seconds = [probe.values[which.name] for which in (metric.PROBE_POLICY_SECONDS, metric.PROBE_DENSE_SECONDS)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    ratio = cost_ratio(probe.proof.dense, probe.proof.policy)
    return SelectionGain(ratio, seconds[0] / seconds[1], share, unit, effective)


def find_selected_share(probe: Probe, policies: Sequence[Policy]) -> tuple[Unit | None, float | None]:
    """Return the unit that the policies select and the fraction of it that is trained. Both are None if nothing is
    selected (dense, frozen parameters, routers)."""
    chosen, kept = probe.policy.report.chosen, probe.policy.report.kept_share
    if chosen is not None and chosen.examples:
        return "examples", chosen.chosen_examples / chosen.examples
    if chosen is not None:
        return "targets", chosen.trained_share
    selectors = [policy for policy in policies if isinstance(policy, GradientSelector)]
    selections = {policy.selection for policy in selectors} - {None}
    if kept is None or not selections:
        return None, None
    return "rows" if selections == {Rows} else "entries", kept


def gain_metrics(worth: SelectionGain) -> dict[str, float | None]:
    """Return a measured gain as metric values by name."""
    found: dict[str, float | None] = {
        metric.CHOICE_COST.name: worth.cost_ratio,
        metric.CHOICE_SECONDS.name: worth.seconds_ratio,
        metric.CHOICE_SHARE.name: worth.share,
        metric.CHOICE_WORTH.name: worth.unit_worth,
    }
    return found | {ESS[unit].name: value for unit, value in worth.effective.items()}


def _norms(tensor: Tensor) -> Tensor:
    norms: Tensor = tensor.detach().float().flatten(0, -2).norm(dim=1)
    return norms
