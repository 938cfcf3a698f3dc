"""What scoring paged index keys moves and computes on GPUs; see `kernels.cost`."""

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.index_scores.triton import Tiling


def cost(
    requests: int,
    rows: int,
    heads: int,
    context: int,
    visible: int,
    index: IndexKeyFormat,
    query_itemsize: int,
    group: int = 0,
) -> Cost:
    """`rows` rows of each request, all of which see `visible` of the `context` positions that are scored.

    query_itemsize: bytes of a query's element. group: keys of a group that maxima are of; 0: there are no maxima.

    A group of rows reads each key, and its page's number, once. Products are those of whole tiles, with the padding of
    heads, rows and widths.
    """
    tiling = Tiling.of(requests, rows, heads, index.width, context, query_itemsize)
    _, groups, runs = tiling.grid(requests, rows, context)
    queries = rows * (heads * (index.width * query_itemsize + 4) + 4) + 4 * groups
    keys = groups * visible * (index.key_bytes + 4)
    tile_flops = 2 * tiling.keys * tiling.rows * tiling.heads * tiling.columns
    return Cost(
        bytes_read=requests * (runs * queries + keys),
        bytes_written=4 * requests * rows * (context + (context // group if group else 0)),
        flops=requests * groups * -(-visible // tiling.keys) * tile_flops,
    )
