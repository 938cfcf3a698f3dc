"""A chat in the terminal with a running server: `python -m glm_dcp_jax.chat`."""
