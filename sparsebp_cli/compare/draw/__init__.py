"""Draws a comparison as PNG, SVG or PDF, in colours that are distinct to colour-blind readers."""
