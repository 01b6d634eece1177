"""PUBLIC. The contract between policies and the engine, and discovery of policies. A policy needs no other import."""

from typing import TYPE_CHECKING

from sparsebp_cli.entry_point import import_moved
from sparsebp_cli.policy import choice, returned, rule
from sparsebp_cli.policy.card import MethodCard
from sparsebp_cli.policy.contract import Budget, GradientSelector, Policy, Site, State, Step
from sparsebp_cli.policy.discovery import FoundPolicy, PolicyLike, find_policies, make_policies, make_policy
from sparsebp_cli.policy.informed import InformedSelector, Reading, Seen, SplitTypes
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.measure import (
    LayerGradient,
    Measure,
    Observation,
    Observed,
    ParameterGradient,
    ReadTokens,
    SiteGradient,
)
from sparsebp_cli.policy.packer import BatchPacker, PackedSize
from sparsebp_cli.policy.parameter import Parameter, ParameterSelector
from sparsebp_cli.policy.reference import ReferenceReader
from sparsebp_cli.policy.router import Edge, EdgeRouter
from sparsebp_cli.policy.saved import Saved, WeightProduct
from sparsebp_cli.policy.schedule import Schedule
from sparsebp_cli.policy.scored_token import ScoredTokenSelector
from sparsebp_cli.policy.selection import Blocks, Columns, Elements, Groups, Rows, Selection, Split, TwoToFour, Values
from sparsebp_cli.policy.shelf import HOMES
from sparsebp_cli.policy.state import Stateful, TrialPass
from sparsebp_cli.policy.token import Score, TokenChoice, Tokens, TokenSelector

# Type checkers must not see __getattr__, which would turn every typo into an Any.
if not TYPE_CHECKING:

    def __getattr__(name):
        return import_moved(__name__, name, HOMES)


__all__ = [
    "BatchPacker",
    "Blocks",
    "Budget",
    "Columns",
    "Edge",
    "EdgeRouter",
    "Elements",
    "FoundPolicy",
    "GradientSelector",
    "Groups",
    "InformedSelector",
    "Kind",
    "LayerGradient",
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
    "ReadTokens",
    "Reading",
    "ReferenceReader",
    "Rows",
    "Saved",
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
    "WeightProduct",
    "choice",
    "find_policies",
    "make_policies",
    "make_policy",
    "returned",
    "rule",
]
