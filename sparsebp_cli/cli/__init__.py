"""The command line: its commands. Only this package prints."""
