"""The probe: dense and policy on one and the same batch, in turn, in the run itself.

It answers what a policy is worth on this machine and model: the ceiling, the speed-up and the share of it that was
realised, the executed FLOPs, what is saved for backward, and how far the gradient is from dense. It leaves no trace:
random generators, gradients, policy state and counters are put back, so a run with probes equals one without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median

from torch import Tensor, nn

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.fidelity import compare_gradients
from sparsebp_cli.backward.flops import count_flops
from sparsebp_cli.backward.memory import saved_bytes, tensor_bytes
from sparsebp_cli.plan import ceiling, realised_share
from sparsebp_cli.run import metric
from sparsebp_cli.worker.checkpoint import capture_rng, restore_rng
from sparsebp_cli.worker.stopwatch import Stopwatch

ROUNDS = 3  # timed pairs; the order within a pair alternates


@dataclass(frozen=True)
class Probe:
    """What is needed to run one micro-batch both ways.

    Args:
        model: With the engine attached, in training mode, without gradients.
        engine: Attached to the model.
        forward: The loss of a micro-batch.
        backward: Differentiates it, as training does.
        stopwatch: For the clock.
    """

    model: nn.Module
    engine: Engine
    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]
    stopwatch: Stopwatch

    def measure(self) -> dict[str, float]:
        """Run dense and policy in turn.

        Returns:
            Metric values by name.
        """
        rng = capture_rng()
        seconds: dict[str, list[float]] = {"dense": [], "policy": []}
        ways = {"dense": self.engine.disabled, "policy": self.engine.probing}
        for number in range(ROUNDS):
            for way in ("dense", "policy") if number % 2 == 0 else ("policy", "dense"):
                restore_rng(rng)
                seconds[way].append(self._time(ways[way]()))
        restore_rng(rng)
        values, dense_grads = self._count(ways["dense"](), metric.BACKWARD_DENSE.name)
        restore_rng(rng)
        policy_values, policy_grads = self._count(ways["policy"](), metric.BACKWARD_EXECUTED.name)
        values |= policy_values
        values |= self._speed(values, {way: median(times) for way, times in seconds.items()})
        fidelity = compare_gradients(policy_grads, dense_grads)
        values |= {metric.COSINE.name: fidelity.cosine, metric.RELATIVE_ERROR.name: fidelity.relative_error}
        restore_rng(rng)
        return values

    def _time(self, way: AbstractContextManager[object]) -> float:
        with way:
            start = self.stopwatch.now()
            self.backward(self.forward())
            end = self.stopwatch.now()
        self._drop_gradients()
        return end - start

    def _count(self, way: AbstractContextManager[object], name: str) -> tuple[dict[str, float], list[Tensor | None]]:
        with way:
            with count_flops() as forward_flops, saved_bytes(self.model) as saved:
                loss = self.forward()
            with count_flops() as backward_flops:
                self.backward(loss)
        gradients = [p.grad for p in self.model.parameters() if p.requires_grad]
        values = {
            metric.FORWARD_FLOPS.name: float(forward_flops.total),
            name: float(backward_flops.total),
            metric.SAVED_BYTES.name: float(saved.total),
            metric.GRADIENT_BYTES.name: float(tensor_bytes(g for g in gradients if g is not None)),
        }
        self._drop_gradients()
        return values, gradients

    def _speed(self, values: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
        forward, dense = values[metric.FORWARD_FLOPS.name], values[metric.BACKWARD_DENSE.name]
        claim = self.engine.claim()
        highest = ceiling(forward, dense, dense - claim.dense_flops + claim.claimed_flops)
        share = realised_share(seconds["dense"], seconds["policy"], highest)
        speed = {
            metric.PROBE_DENSE_SECONDS.name: seconds["dense"],
            metric.PROBE_POLICY_SECONDS.name: seconds["policy"],
            metric.SPEEDUP.name: seconds["dense"] / seconds["policy"],
            metric.CEILING.name: highest,
        }
        return speed if share is None else speed | {metric.REALISED_SHARE.name: share}

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
