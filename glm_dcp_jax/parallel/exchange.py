"""The exchange of records: every rank of a DCP group hands the same number of records to all of them.

`direct` is one all-gather. `ce` is one all-to-all of as many copies as there are ranks, which XLA can give to the copy
engines of GPUs with peer access: unlike W-1 collective permutes it leaves everything in one array, so that nothing is
copied once more to join it. Both deliver the same records in the same order.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from glm_dcp_jax.parallel.mesh import DCP

Transport = Literal["direct", "ce"]


def exchange(mine: Shaped[Array, "n width"], transport: Transport) -> Shaped[Array, "W*n width"]:
    """All ranks' records, n of each in the ranks' order."""
    if transport == "direct":
        return jax.lax.all_gather(mine, DCP, tiled=True)
    to_each = jnp.broadcast_to(mine, (jax.lax.axis_size(DCP), *mine.shape))
    return jax.lax.all_to_all(
        to_each.reshape(-1, mine.shape[1]), DCP, split_axis=0, concat_axis=0, tiled=True
    )
