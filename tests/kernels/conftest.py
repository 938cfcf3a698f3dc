"""What kernels move and multiply, counted in their own loads, stores and products."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.cost import Cost

Elements = jax.Array | int


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Cost]:
    """Call it for what the kernels that were traced since the test's start did since the last call.

    Over all programs; masked elements are not counted.
    """
    seen: dict[str, list[int]] = {"read": [], "written": [], "flops": []}  # callbacks run in several threads
    plain_load, plain_store, plain_dot = tiles.load, tiles.store, tiles.dot

    def add(what: str, each: int, elements: Elements) -> None:
        jax.debug.callback(lambda n: seen[what].append(each * int(n)), jnp.asarray(elements))

    def real(block: jax.Array, mask: jax.Array | None) -> Elements:
        return jnp.sum(jnp.broadcast_to(True if mask is None else mask, block.shape))

    def load(ref, *indices, mask=None, other=0):
        block = plain_load(ref, *indices, mask=mask, other=other)
        add("read", block.dtype.itemsize, real(block, mask))
        return block

    def store(ref, *indices, value, mask=None):
        add("written", value.dtype.itemsize, real(value, mask))
        plain_store(ref, *indices, value=value, mask=mask)

    def dot(a, b, transpose_b=False):
        product = plain_dot(a, b, transpose_b)
        add("flops", 2 * a.shape[1], product.size)
        return product

    for name, counting in {"load": load, "store": store, "dot": dot}.items():
        monkeypatch.setattr(tiles, name, counting)

    def so_far() -> Cost:
        jax.effects_barrier()
        total = Cost(*(sum(seen[what]) for what in ("read", "written", "flops")))
        for amounts in seen.values():
            amounts.clear()
        return total

    return so_far
