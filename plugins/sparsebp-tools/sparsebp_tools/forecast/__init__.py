"""Forecast a recipe's memory and time: rehearse one step on tensors without data, so no weights are read."""
