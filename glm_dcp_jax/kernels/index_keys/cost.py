"""What writing index keys moves; see `kernels.cost`."""

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.index_keys.triton import written_keys


def write_cost(keys: int, key_itemsize: int, index: IndexKeyFormat) -> Cost:
    """`keys` keys written, none skipped, from elements of key_itemsize bytes. Each has a slot; each program a layer."""
    programs = -(-keys // written_keys(keys))
    return Cost(
        bytes_read=4 * programs + keys * (4 + index.width * key_itemsize),
        bytes_written=keys * index.key_bytes,
    )
