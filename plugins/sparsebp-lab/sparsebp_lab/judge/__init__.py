"""Judge proposals, and keep a ledger that bounds the probability of any false keep over all of them."""
