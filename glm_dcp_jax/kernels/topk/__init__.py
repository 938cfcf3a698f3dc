"""Exact, deterministic selection: score descending, then lowest position."""

from glm_dcp_jax.kernels.topk.reference import select_mask, select_positions

__all__ = ["select_mask", "select_positions"]
