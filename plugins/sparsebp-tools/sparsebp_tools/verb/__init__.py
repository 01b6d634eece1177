"""Commands of this package. Their modules import nothing heavy at the top."""
