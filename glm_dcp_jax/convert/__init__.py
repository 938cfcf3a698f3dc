"""Converting a checkpoint into one that loads as it lies: `python -m glm_dcp_jax.convert SRC DST -tp 8`."""
