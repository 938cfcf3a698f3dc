"""Lightning-indexer scores of queries against index keys."""

from glm_dcp_jax.kernels.index_scores.reference import index_scores, row_bytes

__all__ = ["index_scores", "row_bytes"]
