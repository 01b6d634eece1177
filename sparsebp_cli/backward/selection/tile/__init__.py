"""Skipping tiles of attention in the backward, by a tile selector."""
