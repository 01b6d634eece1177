"""Carries the choice of positions out: exactly, or with what carries no gradient detached."""
