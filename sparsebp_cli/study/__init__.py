"""What a study is: its file, the list of its trials, the choices of its tuning. The package sparsebp-lab runs it."""
