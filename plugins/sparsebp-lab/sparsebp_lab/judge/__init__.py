"""Verdicts on proposals, and a ledger that bounds the chance that anything false is kept over all of them."""
