"""Define all metrics, with names, units and directions. No other module spells a metric's name."""

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
    about: str = ""  # definition in one line, for the reference
    when: str = ""  # what a run on a CPU needs to log it, beyond a gradient policy and probes
    timing: bool = False  # whether it depends on the machine's speed, so that repeated runs differ


TRAIN_LOSS = Metric("train/loss", "nats/token", "lower", "mean over all trained targets of a step, equally weighted")
GRAD_NORM = Metric("train/grad_norm", about="norm of the whole gradient, before clipping")
LEARNING_RATE = Metric("train/learning_rate", about="after the step")
TRAIN_TOKENS = Metric("train/tokens", "tokens", about="all tokens so far, padding included")
EVAL_LOSS = Metric("eval/loss", "nats/token", "lower", "loss on the validation split")
EVAL_ACCURACY = Metric("eval/accuracy", "share", "higher", "fraction of the examples whose class is right", "classes")
EVAL_MACRO_F1 = Metric("eval/macro_f1", "share", "higher", "mean F1 of the classes that occur, unweighted", "classes")
EVAL_MCC = Metric("eval/mcc", "", "higher", "Matthews' correlation, as in GLUE's CoLA", "classes")
EVAL_F1 = Metric("eval/f1", "share", "higher", "F1 of the second class, as in GLUE's MRPC and QQP", "two classes")
TEST_LOSS = Metric("test/loss", "nats/token", "lower", "as `eval/loss`, once, after the last step", "test data")
TEST_ACCURACY = Metric("test/accuracy", "share", "higher", "as `eval/accuracy`, once, after the last step", "test data")
TEST_MACRO_F1 = Metric("test/macro_f1", "share", "higher", "as `eval/macro_f1`, once, after the last step", "test data")
TEST_MCC = Metric("test/mcc", "", "higher", "as `eval/mcc`, once, after the last step", "test data")
TEST_F1 = Metric("test/f1", "share", "higher", "as `eval/f1`, once, after the last step", "test data")
FORWARD_SECONDS = Metric("time/forward_seconds", "s", "lower", "forward passes of a step", timing=True)
BACKWARD_SECONDS = Metric("time/backward_seconds", "s", "lower", "backward passes, policy included", timing=True)
SCORING_SECONDS = Metric("time/scoring_seconds", "s", "lower", "scoring forward passes", "chosen targets", timing=True)
OPTIMIZER_SECONDS = Metric("time/optimizer_seconds", "s", "lower", "clipping, update and schedule", timing=True)
STEP_SECONDS = Metric("time/step_seconds", "s", "lower", "whole step, without evaluations and probes", timing=True)
STEP_CPU_SECONDS = Metric("time/step_cpu_seconds", "s", "lower", "CPU time of all threads of the process", timing=True)
LOAD = Metric("host/load", "", "lower", "1-minute load average over the number of CPUs", timing=True)
TOKENS_PER_SECOND = Metric("throughput/tokens_per_sec", "tokens/s", "higher", "tokens of a step over time", timing=True)
PEAK_ALLOCATED_BYTES = Metric("memory/peak_allocated_bytes", "B", "lower", "by CUDA's allocator", "CUDA", timing=True)
PEAK_RESIDENT_BYTES = Metric("memory/peak_resident_bytes", "B", "lower", "of the whole process, on a CPU", timing=True)
WEIGHT_BYTES = Metric("memory/weight_bytes", "B", "lower", "of the weights; shared storage counts once")
GRADIENT_BYTES = Metric("memory/gradient_bytes", "B", "lower", "of the gradients; shared storage counts once")
OPTIMIZER_BYTES = Metric("memory/optimizer_bytes", "B", "lower", "of the optimizer's state; shared storage counts once")
SAVED_BYTES = Metric("memory/saved_for_backward_bytes", "B", "lower", "held for the backward of a micro-batch")
STEP_PEAK_BYTES = Metric("memory/step_peak_bytes", "B", "lower", "live tensors at the peak of a step, on a CPU")
DENSE_SAVED_BYTES = Metric("memory/dense_saved_for_backward_bytes", "B", "lower", "held for a backward without policy")
FORWARD_FLOPS = Metric("flops/forward", "FLOP", "lower", "forward of a micro-batch")
SCORING_FLOPS = Metric("flops/scoring", "FLOP", "lower", "part of the forward that only scores", "chosen targets")
DENSE_FORWARD = Metric("flops/forward_dense", "FLOP", "lower", "forward of the same batch without the policy")
UPDATE_FLOPS = Metric("flops/update", "FLOP", "lower", "clipping and optimizer step")
DENSE_UPDATE_FLOPS = Metric("flops/update_dense", "FLOP", "lower", "clipping and optimizer step in dense training")
STEP_FLOPS = Metric("flops/step", "FLOP", "lower", "cost of a step: forward, backward, update, trial passes")
DENSE_STEP_FLOPS = Metric("flops/step_dense", "FLOP", "lower", "cost of a dense step over the same batch")
PROBING_FLOPS = Metric("flops/probing", "FLOP", "lower", "trial passes of the policy before a step", "trial passes")
BACKWARD_EXECUTED = Metric("flops/backward_executed", "FLOP", "lower", "backward of a micro-batch, as counted")
BACKWARD_DENSE = Metric("flops/backward_dense", "FLOP", "lower", "backward of the same micro-batch without the policy")
CLAIMED_SHARE = Metric("proof/claimed_share", "share", "lower", "estimated FLOPs of the sites' backward, over dense")
EXECUTED_SHARE = Metric("proof/executed_share", "share", "lower", "counted FLOPs of the sites' backward, over dense")
EXCESS_SHARE = Metric("proof/excess_share", "share", "lower", "counted share above the rounded-up estimate; 0 if below")
ROWS_SHARE = Metric("proof/rows_share", "share", "lower", "rows that linear layers multiply in backward, over dense")
PROBE_DENSE_SECONDS = Metric("probe/dense_seconds", "s", "lower", "forward and backward, median of three", timing=True)
PROBE_POLICY_SECONDS = Metric("probe/policy_seconds", "s", "lower", "forward and backward with the policy", timing=True)
LIMIT = Metric("speed/ceiling", "x", "higher", "largest speed-up of forward and backward, by counted FLOPs")
SPEEDUP = Metric("speed/speedup", "x", "higher", "`probe/dense_seconds` over `probe/policy_seconds`", timing=True)
REACHED_SHARE = Metric("speed/realised_share", "share", "higher", "fraction of the limit that was reached", timing=True)
COSINE = Metric("fidelity/cosine", "", "higher", "cosine similarity to the dense gradient of the same batch")
RELATIVE_ERROR = Metric("fidelity/relative_error", "", "lower", "norm of the error over the norm of the dense gradient")
SIGN_AGREEMENT = Metric("fidelity/sign_agreement", "share", "higher", "fraction of entries with the dense sign")
BIAS = Metric("fidelity/bias", "", "lower", "error of a random policy's mean gradient over draws", "fidelity_draws")
BIAS_STANDARD_ERROR = Metric("fidelity/bias_standard_error", "", "lower", "bias expected by chance", "fidelity_draws")
VARIANCE = Metric("fidelity/variance", "", "lower", "variance of the gradient over draws", "fidelity_draws")
SGD_VARIANCE = Metric("fidelity/sgd_variance", about="variance of the dense gradient over micro-batches / norm squared")
NOISE_RATIO = Metric("fidelity/noise_ratio", "", "lower", "squared error of the policy over `fidelity/sgd_variance`")
CHOICE_COST = Metric("choice/cost_ratio", "", "lower", "r: FLOPs of forward and backward over dense, at the start")
CHOICE_SECONDS = Metric("choice/seconds_ratio", "", "lower", "time of forward and backward over dense", timing=True)
CHOICE_SHARE = Metric("choice/share", "share", about="p: trained fraction of targets, examples, rows or entries")
CHOICE_WORTH = Metric("choice/worth", "", "lower", "r / p: how many dense units a kept unit must replace")
KEPT_SHARE = Metric("policy/kept_share", "share", about="fraction of gradient entries kept at the policy's sites")
TRAINED_SHARE = Metric("policy/trained_share", "share", "", "fraction of the targets that is trained", "chosen targets")
CARRIED_SHARE = Metric("policy/carried_share", "share", "", "unpadded positions with a gradient", "chosen targets")
NODES = Metric("policy/nodes", "nodes", "", "nodes in the autograd graph of one backward", "router")
NODES_RUN = Metric("policy/nodes_run", "nodes", "lower", "number of these nodes that received a gradient", "router")
PARAMETERS_REACHED = Metric("policy/parameters_reached", "tensors", "higher", "parameters with a gradient", "router")
MISS_RATE = Metric("policy/miss_rate", "share", "lower", "choices that led away from the largest gradient", "lookahead")

METRICS: dict[str, Metric] = {value.name: value for value in list(globals().values()) if isinstance(value, Metric)}


def find_known(name: str, declared: Iterable[Mapping[str, Mapping[str, str]]] = ()) -> Metric | None:
    """Return a metric by name: a built-in one, or one that runs declare in their facts, such as metrics of generated
    texts. Return None if it is not declared, or if two runs declare it differently."""
    if name in METRICS:
        return METRICS[name]
    known = [one[name] for one in declared if name in one]
    found = {Metric(name, one.get("unit", ""), _read_way(one.get("better", ""))) for one in known}
    return found.pop() if len(found) == 1 else None


def _read_way(text: str) -> Literal["lower", "higher", ""]:
    return "lower" if text == "lower" else "higher" if text == "higher" else ""
