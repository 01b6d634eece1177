"""Policies on a shelf: references, controls from below, and methods that are slower than dense here."""
