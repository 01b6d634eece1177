"""Batches without the rows that no loss needs: padding, what follows the last trained position, repeated prefixes."""
