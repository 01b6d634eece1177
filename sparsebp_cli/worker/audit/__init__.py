"""What runs inside somebody else's training process when `sparsebp audit` has started it.

``site/`` is put on the import path of that process: Python imports ``sitecustomize`` from there before anything else.
"""
