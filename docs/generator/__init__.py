"""One file a generated page. Each has ``page(root)``, which returns the page's whole text."""
