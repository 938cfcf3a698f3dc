"""Moving records between pools and steps: gather at slots, write a layer's or a whole step's records."""

from glm_dcp_jax.kernels.records.reference import commit_records, gather_pages, gather_records, write_records

__all__ = ["commit_records", "gather_pages", "gather_records", "write_records"]
