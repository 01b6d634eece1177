"""Dropping residual blocks from the backward, by a block dropper."""
