"""Choosing examples before the forward, by an example selector."""
