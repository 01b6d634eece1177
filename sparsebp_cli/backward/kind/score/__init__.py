"""Scores of tokens and examples for their selectors, and the cost of computing them."""
