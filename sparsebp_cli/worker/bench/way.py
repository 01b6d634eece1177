"""One way to compute a step's gradients: plain PyTorch, through the engine, with checkpointing, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from sparsebp_cli.asset.checkpointing import checkpoint_activations, keep_activations
from sparsebp_cli.backward import Engine, attach
from sparsebp_cli.backward.linear import function
from sparsebp_cli.policy import Policy

CSR_ALWAYS, CSR_NEVER = 2.0, 0.0  # shares of kept entries below which a product is done in CSR


@dataclass(frozen=True)
class Way:
    """How a step is computed.

    Args:
        label: What it is called.
        sites: Where the engine asks; None: without the engine.
        policy: Who decides; None: dense.
        checkpointing: ``full``: each layer's input is kept, by transformers; the others are the engine's.
        execution: ``fast`` or ``reference``.
        csr_below: Share of kept entries below which products are done in CSR; None: as the engine does it.
        exclude: Sites that stay dense: globs over module names.
        seed: Of random policies.
        compiler: Backend of ``torch.compile`` that runs the model, without the engine; None: eager. The model must be
            its own: what another way prepares it for would compile it again every time.
    """

    label: str
    sites: Literal["linears", "branches", "nodes"] | None = None
    policy: Policy | None = None
    checkpointing: Literal["none", "sparse", "full"] = "none"
    execution: Literal["fast", "reference"] = "fast"
    csr_below: float | None = None
    exclude: tuple[str, ...] = ()
    seed: int = 0
    compiler: str | None = None

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[Engine | None]:
        """Prepare a model, and give it back as it was.

        Args:
            model: Of transformers; not attached.

        Yields:
            Engine | None: What runs the backward; None: autograd itself.
        """
        with ExitStack() as stack:
            if self.checkpointing == "full":
                stack.enter_context(_checkpointing(model))
            if self.csr_below is not None:
                stack.enter_context(_csr_below(self.csr_below))
            if self.sites is None:
                yield None
                return
            own = "none" if self.checkpointing == "full" else self.checkpointing
            policies = [] if self.policy is None else [self.policy]
            options: dict[str, Any] = {"checkpointing": own, "exclude": self.exclude, "seed": self.seed}
            yield stack.enter_context(attach(model, policies, sites=self.sites, execution=self.execution, **options))


@contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
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
