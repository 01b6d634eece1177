"""What a recipe would take: a step of it is rehearsed on tensors without data, so no weights are read."""
