"""Asks token and example selectors: builds what they are shown, with the scores that they need, and counts the cost."""
