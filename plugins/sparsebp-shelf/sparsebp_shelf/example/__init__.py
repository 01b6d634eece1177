"""Choose the examples of a batch before the forward."""

from sparsebp_shelf.example.examples import Examples, ReadExamples
from sparsebp_shelf.example.kept import KeptExamples
from sparsebp_shelf.example.kind import EXAMPLE_SELECTOR, ExampleSelector, WeightedExamples
from sparsebp_shelf.example.sampled import SampledExamples
from sparsebp_shelf.example.uniform import Uniform

__all__ = [
    "EXAMPLE_SELECTOR",
    "ExampleSelector",
    "Examples",
    "KeptExamples",
    "ReadExamples",
    "SampledExamples",
    "Uniform",
    "WeightedExamples",
]
