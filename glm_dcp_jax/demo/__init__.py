"""The built-in small model that a bare `python -m glm_dcp_jax.serve` serves. Imports no jax."""

from glm_dcp_jax.demo.directory import tiny_model_directory

__all__ = ["tiny_model_directory"]
