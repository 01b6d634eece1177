"""What its verbs answer with, as records."""
