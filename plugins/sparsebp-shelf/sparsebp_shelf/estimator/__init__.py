"""Estimate a step's gradient from losses at shifted weights, without a backward."""

from sparsebp_shelf.estimator.kind import GRADIENT_ESTIMATOR, DirectionDraw, GradientEstimator
from sparsebp_shelf.estimator.mezo import MeZO

__all__ = ["GRADIENT_ESTIMATOR", "DirectionDraw", "GradientEstimator", "MeZO"]
