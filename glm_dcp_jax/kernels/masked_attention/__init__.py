"""MLA attention of many rows over one context, each row seeing the columns its mask allows."""

from glm_dcp_jax.kernels.masked_attention.reference import absorbed_attention, expanded_attention

__all__ = ["absorbed_attention", "expanded_attention"]
