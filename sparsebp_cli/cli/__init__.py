"""The command line: its verbs. The only room that prints."""
