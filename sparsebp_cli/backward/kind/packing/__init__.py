"""Execution of batch packers: skip padding, positions after the last trained one, and repeated prefixes."""
