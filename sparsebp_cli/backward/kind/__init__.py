"""What carries out kinds of policies that do not decide at sites: a folder, or a file, for each kind."""
