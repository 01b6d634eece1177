"""Records that the commands of this package return."""
