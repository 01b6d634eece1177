"""How a module's forward is replaced, and random generators are put back."""
