"""Code that ``sparsebp audit`` runs inside a user's training process.

``site/`` is put on the import path of that process, and Python imports ``sitecustomize`` from it before anything else.
"""
