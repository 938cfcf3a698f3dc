"""A prefill server, a decode server and their router on one machine: `python -m glm_dcp_jax.serve.pair`."""
