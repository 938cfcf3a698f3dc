"""The routed experts of a mixture-of-experts layer."""

from glm_dcp_jax.kernels.experts.reference import routed_experts, tile_plan

__all__ = ["routed_experts", "tile_plan"]
