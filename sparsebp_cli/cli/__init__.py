"""The command line: one file a verb. The only room that prints."""
