"""The P/D router: `python -m glm_dcp_jax.serve.router`, one API over prefill and decode servers. It needs no jax."""
