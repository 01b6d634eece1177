"""Define names, units and directions of all metrics. No other module spells a metric's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A number that is logged over steps."""

    name: str  # in MLflow and in the event log
    unit: str = ""  # empty for pure numbers
    better: Literal["lower", "higher", ""] = ""  # which direction is better; empty if neither
    timing: bool = False  # whether it depends on the machine's speed, so that repeated runs differ


TRAIN_LOSS = Metric("train/loss", "nats/token", "lower")
GRAD_NORM = Metric("train/grad_norm")
LEARNING_RATE = Metric("train/learning_rate")
TRAIN_TOKENS = Metric("train/tokens", "tokens")
EVAL_LOSS = Metric("eval/loss", "nats/token", "lower")
EVAL_ACCURACY = Metric("eval/accuracy", "share", "higher")
EVAL_MACRO_F1 = Metric("eval/macro_f1", "share", "higher")  # mean of the classes' F1, unweighted
EVAL_MCC = Metric("eval/mcc", "", "higher")  # Matthews correlation of labels and predictions, as in GLUE's CoLA
EVAL_F1 = Metric("eval/f1", "share", "higher")  # F1 of the second of two classes, as in GLUE's MRPC and QQP
TEST_LOSS = Metric("test/loss", "nats/token", "lower")  # measured once, after the last step
TEST_ACCURACY = Metric("test/accuracy", "share", "higher")
TEST_MACRO_F1 = Metric("test/macro_f1", "share", "higher")
TEST_MCC = Metric("test/mcc", "", "higher")
TEST_F1 = Metric("test/f1", "share", "higher")
FORWARD_SECONDS = Metric("time/forward_seconds", "s", "lower", timing=True)
BACKWARD_SECONDS = Metric("time/backward_seconds", "s", "lower", timing=True)
SCORING_SECONDS = Metric("time/scoring_seconds", "s", "lower", timing=True)  # part of the forward, for selection
OPTIMIZER_SECONDS = Metric("time/optimizer_seconds", "s", "lower", timing=True)
STEP_SECONDS = Metric("time/step_seconds", "s", "lower", timing=True)
STEP_CPU_SECONDS = Metric("time/step_cpu_seconds", "s", "lower", timing=True)  # CPU time of all threads of the process
LOAD = Metric("host/load", "", "lower", timing=True)  # 1-minute load average over the number of CPUs
TOKENS_PER_SECOND = Metric("throughput/tokens_per_sec", "tokens/s", "higher", timing=True)
PEAK_ALLOCATED_BYTES = Metric("memory/peak_allocated_bytes", "B", "lower", timing=True)  # CUDA's allocator
PEAK_RESIDENT_BYTES = Metric("memory/peak_resident_bytes", "B", "lower", timing=True)  # resident memory, on CPU
WEIGHT_BYTES = Metric("memory/weight_bytes", "B", "lower")
GRADIENT_BYTES = Metric("memory/gradient_bytes", "B", "lower")
OPTIMIZER_BYTES = Metric("memory/optimizer_bytes", "B", "lower")
SAVED_BYTES = Metric("memory/saved_for_backward_bytes", "B", "lower")
STEP_PEAK_BYTES = Metric("memory/step_peak_bytes", "B", "lower")  # on CPU: live bytes at the peak of a measured step
DENSE_SAVED_BYTES = Metric("memory/dense_saved_for_backward_bytes", "B", "lower")  # the same batch without the policy
FORWARD_FLOPS = Metric("flops/forward", "FLOP", "lower")
SCORING_FLOPS = Metric("flops/scoring", "FLOP", "lower")  # part of the forward FLOPs used only for selection
DENSE_FORWARD = Metric("flops/forward_dense", "FLOP", "lower")  # the forward of the same batch without the policy
UPDATE_FLOPS = Metric("flops/update", "FLOP", "lower")  # part of the step's FLOPs: clipping and optimizer
DENSE_UPDATE_FLOPS = Metric("flops/update_dense", "FLOP", "lower")  # the same for a dense step
STEP_FLOPS = Metric("flops/step", "FLOP", "lower")  # the cost of a step: passes, update and trial passes
DENSE_STEP_FLOPS = Metric("flops/step_dense", "FLOP", "lower")  # the same for a dense step over the same batch
PROBING_FLOPS = Metric("flops/probing", "FLOP", "lower")  # trial passes that a policy requested before a step
BACKWARD_EXECUTED = Metric("flops/backward_executed", "FLOP", "lower")
BACKWARD_DENSE = Metric("flops/backward_dense", "FLOP", "lower")
# Fraction of the sites' dense backward FLOPs, as the policy claims.
CLAIMED_SHARE = Metric("proof/claimed_share", "share", "lower")
EXECUTED_SHARE = Metric("proof/executed_share", "share", "lower")  # the same fraction, as counted
EXCESS_SHARE = Metric("proof/excess_share", "share", "lower")  # counted beyond the claim (rounded up)
ROWS_SHARE = Metric("proof/rows_share", "share", "lower")  # positions that linears multiply backward, over dense
MOVED_TENSORS = Metric("proof/moved_tensors", "tensors")  # trained parameters that the step changed
MOVED_SHARE = Metric("proof/moved_share", "share")  # entries of trained parameters that the step changed
PROBE_DENSE_SECONDS = Metric("probe/dense_seconds", "s", "lower", timing=True)  # forward + backward, one micro-batch
PROBE_POLICY_SECONDS = Metric("probe/policy_seconds", "s", "lower", timing=True)
LIMIT = Metric("speed/ceiling", "x", "higher")
SPEEDUP = Metric("speed/speedup", "x", "higher", timing=True)  # forward + backward against dense, in the same run
REACHED_SHARE = Metric("speed/realised_share", "share", "higher", timing=True)
COSINE = Metric("fidelity/cosine", "", "higher")
RELATIVE_ERROR = Metric("fidelity/relative_error", "", "lower")
SIGN_AGREEMENT = Metric("fidelity/sign_agreement", "share", "higher")
BIAS = Metric("fidelity/bias", "", "lower")  # for random policies, over fidelity_draws
BIAS_STANDARD_ERROR = Metric("fidelity/bias_standard_error", "", "lower")  # bias expected by chance alone
VARIANCE = Metric("fidelity/variance", "", "lower")
SGD_VARIANCE = Metric("fidelity/sgd_variance", "")  # dense gradient over micro-batches, over its squared norm
NOISE_RATIO = Metric("fidelity/noise_ratio", "", "lower")  # the policy's squared error over sgd_variance
CHOICE_COST = Metric("choice/cost_ratio", "", "lower")  # r: FLOPs of a policy's step over dense, before training
CHOICE_SECONDS = Metric("choice/seconds_ratio", "", "lower", timing=True)  # in time, measured alternately
CHOICE_SHARE = Metric("choice/share", "share")  # p: fraction trained of what the policy chooses from
CHOICE_WORTH = Metric("choice/worth", "", "lower")  # r / p: how many dense units a kept unit must be worth
KEPT_SHARE = Metric("policy/kept_share", "share")
TRAINED_SHARE = Metric("policy/trained_share", "share")  # fraction of the targets whose loss counts
CARRIED_SHARE = Metric("policy/carried_share", "share")  # fraction of non-padding positions with a gradient
NODES = Metric("policy/nodes", "nodes")  # nodes in the autograd graph of one backward
NODES_RUN = Metric("policy/nodes_run", "nodes", "lower")  # number of these nodes that received a gradient
PARAMETERS_REACHED = Metric("policy/parameters_reached", "tensors", "higher")  # parameters that got a gradient
MISS_RATE = Metric("policy/miss_rate", "share", "lower")  # choices that led away from the largest gradient

METRICS: dict[str, Metric] = {value.name: value for value in list(globals().values()) if isinstance(value, Metric)}


def find_known(name: str, declared: Iterable[Mapping[str, Mapping[str, str]]] = ()) -> Metric | None:
    """Return a metric by name: a built-in one, or one that runs declare in their facts, such as metrics of generated
    texts. Return None if it is not declared, or if two runs declare it differently."""
    if name in METRICS:
        return METRICS[name]
    found = {
        Metric(name, one[name].get("unit", ""), _read_way(one[name].get("better", "")))
        for one in declared
        if name in one
    }
    return found.pop() if len(found) == 1 else None


def _read_way(text: str) -> Literal["lower", "higher", ""]:
    return "lower" if text == "lower" else "higher" if text == "higher" else ""
