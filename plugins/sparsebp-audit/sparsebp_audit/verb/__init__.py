"""The verb ``sparsebp audit``. Nothing heavy is imported at the top of its module."""
