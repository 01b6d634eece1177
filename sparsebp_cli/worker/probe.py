"""The probe: dense and policy on one and the same batch, in turn, in the run itself.

It answers what a policy is worth on this machine and model: the ceiling, the speed-up and the share of it that was
realised, the executed FLOPs, what is saved for backward, and how far the gradient is from dense. It leaves no trace:
random generators, gradients, policy state and counters are put back, so a run with probes equals one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from torch import Tensor, nn

from sparsebp_cli.backward import Claim, Engine
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
        backward: Differentiates it without the engine, as training without policies would.
        stopwatch: For the clock.
    """

    model: nn.Module
    engine: Engine
    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]
    stopwatch: Stopwatch

    def measure(self) -> dict[str, float | None]:
        """Run dense and policy in turn.

        Returns:
            Metric values by name.
        """
        rng = capture_rng()
        seconds: dict[str, list[float]] = {"dense": [], "policy": []}
        for number in range(ROUNDS):
            for way in ("dense", "policy") if number % 2 == 0 else ("policy", "dense"):
                restore_rng(rng)
                seconds[way].append(self._time(way))
        restore_rng(rng)
        values, dense_grads, _ = self._count("dense", metric.BACKWARD_DENSE.name)
        restore_rng(rng)
        policy_values, policy_grads, claim = self._count("policy", metric.BACKWARD_EXECUTED.name)
        values |= policy_values
        values |= _speed(values, claim, median(seconds["dense"]), median(seconds["policy"]))
        fidelity = compare_gradients(policy_grads, dense_grads)
        restore_rng(rng)
        return values | {metric.COSINE.name: fidelity.cosine, metric.RELATIVE_ERROR.name: fidelity.relative_error}

    @contextmanager
    def _on(self, way: str) -> Iterator[Callable[[Tensor], None]]:
        if way == "dense":
            with self.engine.disabled():
                yield self.backward
        else:
            with self.engine.probing():
                yield lambda loss: self.engine.backward(loss, self.backward)

    def _time(self, way: str) -> float:
        with self._on(way) as backward:
            start = self.stopwatch.now()
            backward(self.forward())
            end = self.stopwatch.now()
        self._drop_gradients()
        return end - start

    def _count(self, way: str, name: str) -> tuple[dict[str, float], list[Tensor | None], Claim]:
        with self._on(way) as backward:
            with count_flops() as forward_flops, saved_bytes(self.model.parameters()) as saved:
                loss = self.forward()
            with count_flops() as backward_flops:
                backward(loss)
            claim = self.engine.claim()
        gradients = [p.grad for p in self.model.parameters() if p.requires_grad]
        values = {
            metric.FORWARD_FLOPS.name: float(forward_flops.total),
            name: float(backward_flops.total),
            metric.SAVED_BYTES.name: float(saved.total),
            metric.GRADIENT_BYTES.name: float(tensor_bytes(g for g in gradients if g is not None)),
        }
        self._drop_gradients()
        return values, gradients, claim

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def _speed(values: dict[str, float], claim: Claim, dense_seconds: float, policy_seconds: float) -> dict[str, float]:
    forward, dense = values[metric.FORWARD_FLOPS.name], values[metric.BACKWARD_DENSE.name]
    highest = ceiling(forward, dense, dense - claim.dense_flops + claim.claimed_flops)
    share = realised_share(dense_seconds, policy_seconds, highest)
    speed = {
        metric.PROBE_DENSE_SECONDS.name: dense_seconds,
        metric.PROBE_POLICY_SECONDS.name: policy_seconds,
        metric.SPEEDUP.name: dense_seconds / policy_seconds,
        metric.CEILING.name: highest,
    }
    return speed if share is None else speed | {metric.REALISED_SHARE.name: share}
