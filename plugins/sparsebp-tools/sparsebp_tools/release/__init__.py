"""Write a trained model for others: its folder with a card, a converted file, or an upload to a hub."""

from sparsebp_tools.release.folder import ReleasedModel, write_model
from sparsebp_tools.release.weights import ReleasedWeights, find_weights

__all__ = ["ReleasedModel", "ReleasedWeights", "find_weights", "write_model"]
