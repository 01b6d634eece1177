"""The engine: its steps, its decisions at sites, its counts and its report."""
