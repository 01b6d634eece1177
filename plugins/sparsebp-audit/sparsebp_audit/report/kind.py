"""The kinds of waste that an audit detects, with their titles and advice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FindingKind:
    """One kind of waste."""

    title: str
    advice: str  # what to do, in one sentence
    exact: bool = True  # all of it can be removed without changing any used result


BY_LOSSLESS = ("ignored-logits", "padding", "zero-rows", "shared-prefix")  # the policy of that name leaves them out
LOSSLESS_REFUSED = "the policy lossless does not support this training: "  # beginning of a report's note
LOSSLESS_ADVICE = "; the policy lossless does this for you: `sparsebp audit --apply` tries it, `--write` keeps it"

KINDS: dict[str, FindingKind] = {
    "frozen-wgrad": FindingKind(
        "weight gradients of frozen parameters",
        "in the autograd Function, get the weight's gradient and save the input only if ctx.needs_input_grad is true",
    ),
    "dropped-gradient": FindingKind(
        "gradients that autograd drops",
        "in the autograd Function's backward, return None where ctx.needs_input_grad is false",
    ),
    "unread-leaf": FindingKind(
        "gradients of inputs that nobody reads",
        "do not call requires_grad_() on inputs, or name the wanted leaves: backward(inputs=...); with checkpointing, "
        "use use_reentrant=False, which needs no such call",
    ),
    "ignored-logits": FindingKind(
        "logits whose gradient is zero: their labels are ignored",
        "give the head only the rows that have a label: logits_to_keep, or select hidden states before the head",
    ),
    "padding": FindingKind(
        "padding positions",
        "batch examples of similar length, pad to the longest example of the batch, or pack without padding",
    ),
    "zero-rows": FindingKind(
        "products with rows of the gradient that are exactly zero",
        "cut each batch after its last trained position; only a backward that skips rows avoids zero rows before it",
    ),
    "shared-prefix": FindingKind(
        "prefixes that examples of a batch share",
        "compute each prefix once: it has the same hidden states in every example that begins with it",
    ),
    "unread-saved": FindingKind(
        "tensors saved for the backward that it never reads",
        "call ctx.save_for_backward only for tensors that the backward reads: ctx.needs_input_grad shows which",
    ),
    "unvisited-saved": FindingKind(
        "activations saved for a backward that never ran",
        "compute what is not part of the loss under torch.no_grad(), or detach its input",
    ),
    "unheld": FindingKind(
        "gradients of parameters that no optimizer holds",
        "call requires_grad_(False) on them before the forward: the backward then ends at the lowest trained parameter",
    ),
    "zero-rate": FindingKind(
        "gradients of parameters whose learning rate is zero",
        "call requires_grad_(False) on them for as long as their learning rate is zero",
    ),
    "idle-state": FindingKind(
        "optimizer state of parameters that were not trained at the last step",
        "to save memory, delete optimizer.state[parameter] when you stop training a parameter; if you train it again, "
        "it starts with new state",
        exact=False,
    ),
    "zero-gradient": FindingKind(
        "gradients that were all zero in every step",
        "find out why no gradient reaches them (a dead unit, a mask, a detached branch); freeze them if this is "
        "intended",
        exact=False,
    ),
    "lost-update": FindingKind(
        "parameters that did not move although they had a gradient",
        "the update is smaller than the last bit of the parameter: keep float32 weights, or raise the learning rate",
        exact=False,
    ),
    "discarded": FindingKind(
        "gradients that were cleared before a step used them",
        "clear gradients after optimizer.step(), not between the backward passes of one step; for unwanted gradients, "
        "such as a discriminator's in its generator's step, use requires_grad_(False) or backward(inputs=...)",
    ),
    "scanning-hooks": FindingKind(
        "hooks that go through many parameters at every call",
        "let a parameter's hook visit only its own parameter: with P parameters, hooks that visit all of them "
        "make P*P visits",
    ),
}
