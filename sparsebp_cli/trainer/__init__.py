"""PUBLIC. Policies in a ``transformers.Trainer``: a drop-in subclass, and a callback for trainers of any class."""

from sparsebp_cli.trainer.callback import PolicyCallback, PolicyTrainer

__all__ = ["PolicyCallback", "PolicyTrainer"]
