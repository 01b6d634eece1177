"""What policies of the tests promise, of whichever kind they are: each test says what they decide."""

from __future__ import annotations


class Nothing:
    """Neither the dense gradients, nor these as the mean."""

    @property
    def exact(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False


class Everything:
    """The dense gradients, whatever is drawn."""

    @property
    def exact(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True
