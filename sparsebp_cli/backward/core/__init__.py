"""The engine: step numbering, decisions at sites, counters and the report."""
