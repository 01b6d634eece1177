"""Token selection: exact, or with positions that carry no gradient detached."""
