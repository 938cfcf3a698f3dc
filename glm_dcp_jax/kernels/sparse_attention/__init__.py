"""Absorbed MLA attention of each row over its own list of records."""

from glm_dcp_jax.kernels.sparse_attention.reference import sparse_attention

__all__ = ["sparse_attention"]
