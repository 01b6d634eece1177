"""Define variants of computing a step's gradients: plain PyTorch, with the engine, with checkpointing, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import nn

from sparsebp_cli.backward import Engine, attach
from sparsebp_cli.backward.linear import function
from sparsebp_cli.policy import Policy
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations, keep_activations

CSR_ALWAYS, CSR_NEVER = 2.0, 0.0  # values of csr_below that force or exclude products in CSR


@dataclass(frozen=True)
class Variant:
    """A variant of computing a step's gradients."""

    label: str
    sites: Literal["linears", "nodes"] | None = None  # None: without the engine
    policy: Policy | None = None  # None: dense
    checkpointing: Literal["none", "full"] = "none"  # full: transformers' own
    execution: Literal["fast", "reference"] = "fast"
    # Fraction of kept entries below which products are computed in CSR; None: the engine's default.
    csr_below: float | None = None
    exclude: tuple[str, ...] = ()  # sites that stay dense: globs over module names
    seed: int = 0  # of random policies
    # Backend of torch.compile, without the engine; None: eager. It needs a model of its own, because preparing the
    # model for another variant recompiles it.
    compiler: str | None = None

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[Engine | None]:
        """Prepare a transformers model, yield the engine or None for plain autograd, and restore the model."""
        with ExitStack() as stack:
            if self.checkpointing == "full":
                stack.enter_context(_checkpointing(model))
            if self.csr_below is not None:
                stack.enter_context(_csr_below(self.csr_below))
            if self.sites is None:
                yield None
                return
            policies = [] if self.policy is None else [self.policy]
            engine = attach(
                model,
                policies,
                sites=self.sites,
                execution=self.execution,
                exclude=self.exclude,
                seed=self.seed,
            )
            yield stack.enter_context(engine)


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    checkpoint_activations(model)
    try:
        yield
    finally:
        keep_activations(model)


@contextmanager
def _csr_below(share: float) -> Iterator[None]:
    before, function.CSR_BELOW = function.CSR_BELOW, share
    try:
        yield
    finally:
        function.CSR_BELOW = before
