"""PUBLIC. The contract between policies and the engine, and discovery of policies. A plugin imports nothing else."""

from sparsebp_cli.policy import choice, rule, sampling
from sparsebp_cli.policy.card import MethodCard
from sparsebp_cli.policy.contract import Budget, GradientSelector, Policy, Site, State, Step
from sparsebp_cli.policy.discovery import FoundPolicy, PolicyLike, find_policies, make_policies, make_policy
from sparsebp_cli.policy.epoch import Epoch, EpochSelector, Visits
from sparsebp_cli.policy.example import Examples, ExampleSelector, WeightedExamples
from sparsebp_cli.policy.gradient_sample import sample_gradient
from sparsebp_cli.policy.informed import InformedSelector, Reading, Seen, SplitTypes
from sparsebp_cli.policy.kept_example import KeptExamples
from sparsebp_cli.policy.kept_output import KeptOutputs
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.layer import LayerOutput, LayerSampler
from sparsebp_cli.policy.measure import (
    LayerGradient,
    LinearInput,
    Measure,
    Observation,
    Observed,
    ParameterGradient,
    ReaderGradients,
    ReadExamples,
    ReadTokens,
    SiteGradient,
)
from sparsebp_cli.policy.packer import BatchPacker, PackedSize
from sparsebp_cli.policy.parameter import Parameter, ParameterSelector
from sparsebp_cli.policy.reference import ReferenceReader
from sparsebp_cli.policy.router import Edge, EdgeRouter
from sparsebp_cli.policy.sampled_example import SampledExamples
from sparsebp_cli.policy.saved import (
    Saved,
    SavedColumns,
    SavedDirection,
    SavedElements,
    SavedRepresentatives,
    SavedRows,
)
from sparsebp_cli.policy.saved_projection import SavedProjection, SavedSketch
from sparsebp_cli.policy.saver import InputSaver
from sparsebp_cli.policy.schedule import Schedule
from sparsebp_cli.policy.scored_token import ScoredTokenSelector
from sparsebp_cli.policy.selection import Blocks, Columns, Elements, Groups, Rows, Selection, Split, TwoToFour, Values
from sparsebp_cli.policy.state import Stateful, TrialPass
from sparsebp_cli.policy.token import Score, TokenChoice, Tokens, TokenSelector

__all__ = [
    "BatchPacker",
    "Blocks",
    "Budget",
    "Columns",
    "Edge",
    "EdgeRouter",
    "Elements",
    "Epoch",
    "EpochSelector",
    "ExampleSelector",
    "Examples",
    "FoundPolicy",
    "GradientSelector",
    "Groups",
    "InformedSelector",
    "InputSaver",
    "KeptExamples",
    "KeptOutputs",
    "Kind",
    "LayerGradient",
    "LayerOutput",
    "LayerSampler",
    "LinearInput",
    "Measure",
    "MethodCard",
    "Observation",
    "Observed",
    "PackedSize",
    "Parameter",
    "ParameterGradient",
    "ParameterSelector",
    "Policy",
    "PolicyLike",
    "ReadExamples",
    "ReadTokens",
    "ReaderGradients",
    "Reading",
    "ReferenceReader",
    "Rows",
    "SampledExamples",
    "Saved",
    "SavedColumns",
    "SavedDirection",
    "SavedElements",
    "SavedProjection",
    "SavedRepresentatives",
    "SavedRows",
    "SavedSketch",
    "Schedule",
    "Score",
    "ScoredTokenSelector",
    "Seen",
    "Selection",
    "Site",
    "SiteGradient",
    "Split",
    "SplitTypes",
    "State",
    "Stateful",
    "Step",
    "TokenChoice",
    "TokenSelector",
    "Tokens",
    "TrialPass",
    "TwoToFour",
    "Values",
    "Visits",
    "WeightedExamples",
    "choice",
    "find_policies",
    "make_policies",
    "make_policy",
    "rule",
    "sample_gradient",
    "sampling",
]
