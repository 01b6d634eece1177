"""What leaves with a trained model: its folder for others, with a card, converted, or on a hub."""

from sparsebp_tools.release.folder import ReleasedModel, write_model
from sparsebp_tools.release.weights import Weights, find_weights

__all__ = ["ReleasedModel", "Weights", "find_weights", "write_model"]
