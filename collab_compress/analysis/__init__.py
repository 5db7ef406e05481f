"""Measures of attention heads (similarity, diversity, importance) and of layers (widths, cost, latency)."""

from collab_compress.analysis.covariance import (
    JointCovariance,
    head_covariances,
    layer_covariance,
    mean_over_pairs,
    model_covariances,
)
from collab_compress.analysis.dominance import (
    Dominance,
    PruningPoint,
    dominant_heads,
    pruning_curve,
    random_importance,
    split_sequences,
)
from collab_compress.analysis.latency import Latency, model_latency, module_latency
from collab_compress.analysis.patterns import AttentionMap, attention_maps, head_patterns, induction
from collab_compress.analysis.plan import Plan, Row, plan
from collab_compress.analysis.sharing import Energy, alpha_matrices, head_energy, mixing_matrices
from collab_compress.analysis.similarity import SVCCA, Discrepancy, bhattacharyya, cka, discrepancy, svcca
from collab_compress.analysis.stream import with_progress
from collab_compress.conversion.cost import PartCost, part_costs
from collab_compress.heads import average_distance, confidence

__all__ = [
    "SVCCA",
    "AttentionMap",
    "Discrepancy",
    "Dominance",
    "Energy",
    "JointCovariance",
    "Latency",
    "PartCost",
    "Plan",
    "PruningPoint",
    "Row",
    "alpha_matrices",
    "attention_maps",
    "average_distance",
    "bhattacharyya",
    "cka",
    "confidence",
    "discrepancy",
    "dominant_heads",
    "head_covariances",
    "head_energy",
    "head_patterns",
    "induction",
    "layer_covariance",
    "mean_over_pairs",
    "mixing_matrices",
    "model_covariances",
    "model_latency",
    "module_latency",
    "part_costs",
    "plan",
    "pruning_curve",
    "random_importance",
    "split_sequences",
    "svcca",
    "with_progress",
]
