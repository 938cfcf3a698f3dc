"""The HTTP server: `python -m glm_dcp_jax.serve`, OpenAI's API over an engine."""
