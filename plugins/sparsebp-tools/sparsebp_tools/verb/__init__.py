"""The verbs of the package. Nothing heavy is imported at the top of their modules."""
