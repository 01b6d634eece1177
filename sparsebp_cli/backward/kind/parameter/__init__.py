"""Which parameters a step trains, and at which rates, by a parameter selector."""
