"""The ops that are checked, and the costs that they declare, under the names that this package uses."""

from glm_dcp_jax.kernels.experts import routed_experts
from glm_dcp_jax.kernels.experts.cost import cost as routed_experts_cost
from glm_dcp_jax.kernels.experts.cost import expected_experts
from glm_dcp_jax.kernels.index_keys import write_index_keys
from glm_dcp_jax.kernels.index_keys.cost import write_cost as write_index_keys_cost
from glm_dcp_jax.kernels.index_scores import paged_index_scores
from glm_dcp_jax.kernels.index_scores.cost import cost as index_scores_cost
from glm_dcp_jax.kernels.linear import gated_linear, linear
from glm_dcp_jax.kernels.linear.cost import cost as linear_cost
from glm_dcp_jax.kernels.records import pack_records, unpack_records, write_records
from glm_dcp_jax.kernels.records.cost import pack_cost, write_cost
from glm_dcp_jax.kernels.selection import select_paged
from glm_dcp_jax.kernels.sparse_attention import sparse_attention
from glm_dcp_jax.kernels.sparse_attention.cost import cost as sparse_attention_cost
from glm_dcp_jax.kernels.topk import maxima_group, select_positions
from glm_dcp_jax.kernels.topk.cost import cost as topk_cost

__all__ = [
    "expected_experts",
    "gated_linear",
    "index_scores_cost",
    "linear",
    "linear_cost",
    "pack_cost",
    "maxima_group",
    "pack_records",
    "paged_index_scores",
    "routed_experts",
    "routed_experts_cost",
    "select_paged",
    "select_positions",
    "sparse_attention",
    "sparse_attention_cost",
    "topk_cost",
    "unpack_records",
    "write_cost",
    "write_index_keys",
    "write_index_keys_cost",
    "write_records",
]
