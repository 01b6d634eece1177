"""The command ``sparsebp audit``. Its module imports nothing heavy at the top."""
