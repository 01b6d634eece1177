"""Before anything is trained: what a step of the policy costs, what it keeps, and whether choosing can pay at all.

From one forward (norms of the loss's gradient at the head, ||softmax - onehot||), one dense backward (norms of rows at
the sites), and a probe of dense and policy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.plan.worth import Unit, Worth, effective_share
from sparsebp_cli.policy import GradientSelector, Policy, Rows
from sparsebp_cli.run import metric
from sparsebp_cli.worker.data import IGNORED
from sparsebp_cli.worker.probe import Probe, cost_ratio
from sparsebp_cli.worker.rehearsal import Rehearsal

ESS = {"targets": metric.TARGET_ESS, "examples": metric.EXAMPLE_ESS, "rows": metric.ROW_ESS}


@dataclass
class NormSums:
    """Sums of norms, from which their effective sample size follows."""

    total: float = 0.0
    squares: float = 0.0
    number: int = 0

    def add(self, norms: Tensor) -> None:
        """Take in norms, in any shape."""
        norms = norms.detach().double()
        self.total += float(norms.sum())
        self.squares += float(norms.square().sum())
        self.number += norms.numel()

    @property
    def effective(self) -> float | None:
        """Effective sample size over the number, in (0, 1]; None where all norms are zero."""
        return effective_share(self.total, self.squares, self.number)


def head_norms(logits: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """Yield, example by example, the norm of the gradient of each target's loss with respect to its logits.

    Args:
        logits: (B, T, V) of next tokens, or (B, V) of a classification.
        labels: (B, T) with -100 where nothing counts, or (B,).

    Yields:
        Tensor: One norm a target, ||softmax - onehot||.
    """
    for logits_of_one, labels_of_one in zip(logits, labels, strict=True):
        scores, wanted = logits_of_one[None], labels_of_one[None]
        if labels.ndim > 1:
            scores, wanted = logits_of_one[:-1], labels_of_one[1:]
        counts_N = wanted != IGNORED
        share_NV = scores[counts_N].float().softmax(-1)
        of_label_N = share_NV.gather(1, wanted[counts_N][:, None])[:, 0]
        yield (share_NV.square().sum(1) - 2.0 * of_label_N + 1.0).clamp(min=0.0).sqrt()


def head_ess(logits: Tensor, labels: Tensor) -> dict[Unit, float]:
    """Return the effective sample size of the targets and of the examples, by norms at the head.

    Args:
        logits: See :func:`head_norms`.
        labels: See :func:`head_norms`.

    Returns:
        By unit; what has no gradient is left out. An example's norm is that of its targets' gradients together.
    """
    targets, examples = NormSums(), NormSums()
    for norms in head_norms(logits, labels):
        targets.add(norms)
        examples.add(norms.double().square().sum().sqrt())
    found: dict[Unit, float | None] = {"targets": targets.effective, "examples": examples.effective}
    return {unit: value for unit, value in found.items() if value is not None}


@dataclass
class RowNorms:
    """Norms of rows at sites in one backward: of a linear those of its weight's gradient, |x| |dy|, else |dy|.

    Args:
        sums: By site.
    """

    sums: dict[str, NormSums] = field(default_factory=dict)

    @contextmanager
    def of(self, model: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Listen at modules.

        Args:
            model: That runs forward and backward inside.
            names: Of its modules.

        Yields:
            None: As long as it listens.
        """
        handles = [model.get_submodule(name).register_forward_hook(self._listen(name)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def effective(self) -> float | None:
        """Median over the sites; None where no gradient came."""
        found = [value for sums in self.sums.values() if (value := sums.effective) is not None]
        return statistics.median(found) if found else None

    def _listen(self, name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def hear(module: nn.Module, given: tuple[object, ...], output: object) -> None:
            shown = output[0] if isinstance(output, tuple) else output
            if not isinstance(shown, Tensor) or not shown.requires_grad:
                return
            x_norm = _norms(given[0]) if isinstance(module, nn.Linear) and isinstance(given[0], Tensor) else None

            def take(grad: Tensor) -> None:
                norms = _norms(grad)
                self.sums.setdefault(name, NormSums()).add(norms if x_norm is None else norms * x_norm)

            shown.register_hook(take)  # type: ignore[no-untyped-call]

        return hear


def measure_worth(
    rehearsal: Rehearsal,
    probe: Probe,
    batch: Mapping[str, Tensor],
    run: Callable[..., object],
    policies: Sequence[Policy],
) -> Worth:
    """Measure what choosing may gain on one micro-batch.

    Args:
        rehearsal: Entered; of that micro-batch.
        probe: Of the same.
        batch: The micro-batch, on the device.
        run: The model.
        policies: Of the recipe.

    Returns:
        What was found.
    """
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    with rehearsal.on("dense"), torch.no_grad():
        logits = getattr(run(**arguments), "logits", None)
        effective = {} if logits is None else head_ess(logits, batch["labels"])
        del logits
    rows, modules = RowNorms(), dict(rehearsal.model.named_modules())
    names = [site.name for site in probe.policy.report.sites if site.name in modules]
    names = names or [name for name, _, _ in find_linears(rehearsal.model).covered]
    with rehearsal.on("dense") as backward, rows.of(rehearsal.model, names):
        backward(rehearsal.forward())
    if rows.effective is not None:
        effective["rows"] = rows.effective
    unit, share = find_choice(probe, policies)
    seconds = [probe.values[which.name] for which in (metric.PROBE_POLICY_SECONDS, metric.PROBE_DENSE_SECONDS)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    ratio = cost_ratio(probe.proof.dense, probe.proof.policy)
    return Worth(ratio, seconds[0] / seconds[1], share, unit, effective)


def find_choice(probe: Probe, policies: Sequence[Policy]) -> tuple[Unit | None, float | None]:
    """Return what the policies choose among, and the share that is trained.

    Args:
        probe: Of a step with them.
        policies: Of the recipe.

    Returns:
        Both None where nothing is chosen: dense, frozen parameters, routers.
    """
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


def worth_values(worth: Worth) -> dict[str, float | None]:
    """Return a measured worth as metric values.

    Args:
        worth: What was found.

    Returns:
        By name; None where there is none.
    """
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
