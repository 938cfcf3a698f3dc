"""Sharding rules: logical axis of a parameter -> mesh axes."""

from jax.sharding import PartitionSpec as P

from glm_dcp_jax.parallel.mesh import REPLICA, TENSOR_AXES

RULES: dict[str | None, tuple[str, ...] | None] = {
    "heads": TENSOR_AXES,
    "ffn": TENSOR_AXES,
    "experts": TENSOR_AXES,
    "vocab": TENSOR_AXES,
    "hidden": TENSOR_AXES,
    "group_heads": (REPLICA,),
    None: None,
}
"""group_heads: those of a DCP group on each of its ranks. hidden: outputs of the MTP layer's input projection. Norms,
indexer, q_a, kv_a and router are replicated."""


def spec_of(axes: tuple[str | None, ...]) -> P:
    """The PartitionSpec of a parameter with these logical axes."""
    return P(*(RULES[axis] for axis in axes))


def padded(size: int, parts: int) -> int:
    """The size rounded up to a multiple of `parts`; the surplus is filled with zeros."""
    return -(-size // parts) * parts
