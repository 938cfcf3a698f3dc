"""Refusing arrays that do not fit together, at the edge of an op: a kernel would read or write past their ends.

Only shapes and dtypes are looked at, so that nothing of this is left in a compiled program.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, DTypeLike, Int

from glm_dcp_jax.cache.records import IndexKeyFormat, RecordFormat

Sizes = Mapping[str, tuple[int, str]]
"""The size that a letter must have, and what asks for it."""


def check_axes(sizes: Sizes, **arrays: tuple[Array, str]) -> None:
    """Raise ValueError unless each array has the axes that its letters name, equal letters having equal sizes.

    A letter that is not among `sizes` has the size of the first array with it.
    """
    given = dict(sizes)
    for name, (array, letters) in arrays.items():
        axes = letters.split()
        known = [axis for axis in axes if axis in given]
        fits = array.ndim == len(axes)
        for axis, size in zip(axes, array.shape, strict=False):
            fits &= given.setdefault(axis, (size, name))[0] == size
        if not fits:
            wanted = ", ".join(f"{axis} = {given[axis][0]} ({given[axis][1]})" for axis in known)
            raise ValueError(
                f"{name} is {list(array.shape)}, but must be [{', '.join(axes)}]"
                + (f" with {wanted}" if wanted else "")
            )


def record_sizes(record: RecordFormat) -> Sizes:
    """Sizes of the letters of records, and of what they are made of."""
    latent, rope = record.latent_width, record.rope_width
    sizes = {"width": record.width, "C": latent, "R": rope, "CR": latent + rope}
    return {letter: (size, f"{record.name} of {latent} + {rope}") for letter, size in sizes.items()}


def check_dtype(dtype: DTypeLike, wanted_by: str, **arrays: Array) -> None:
    """Raise ValueError unless the arrays are of this dtype, which `wanted_by` asks for."""
    for name, array in arrays.items():
        if jnp.result_type(array) != jnp.dtype(dtype):
            raise ValueError(f"{name} is {array.dtype}, but must be {jnp.dtype(dtype)} ({wanted_by})")


def check_floats(**arrays: Array) -> None:
    """Raise ValueError unless the arrays are float32, bfloat16 or float16."""
    for name, array in arrays.items():
        if jnp.result_type(array) not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"{name} is {array.dtype}, but must be float32, bfloat16 or float16")


def int32(name: str, numbers: ArrayLike) -> Int[Array, "*shape"]:
    """The numbers as int32. Raises ValueError unless they are integers."""
    array = jnp.asarray(numbers)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} is {array.dtype}, but must be int32")
    return array.astype(jnp.int32)


def check_index_pool(pool: Array, index: IndexKeyFormat, block_size: int) -> None:
    """Raise ValueError unless the pool is one that `index.pool_shape` describes."""
    if block_size < 1:
        raise ValueError(f"there are no blocks of {block_size} keys; give the block_size of the pool")
    check_dtype(index.dtype, f"{index.kind} keys", pool=pool)
    if index.quantised:
        block = block_size * index.key_bytes, f"{block_size} keys of {index.width} codes and a scale"
        check_axes({"bytes": block}, pool=(pool, "full blocks bytes"))
    else:
        check_axes({"D": (index.width, f"{index.kind} keys")}, pool=(pool, "full slots D"))


def check_index_pages(pool: Array, index: IndexKeyFormat, page_tokens: int, block_size: int) -> None:
    """Raise ValueError unless the pool is as `check_index_pool` wants it and made of whole pages of whole blocks."""
    check_index_pool(pool, index, block_size)
    if page_tokens % block_size:
        raise ValueError(
            f"a page of {page_tokens} tokens is not made of blocks of {block_size}; use a multiple of block_size"
        )
    check_pages(pool.shape[1] * (block_size if index.quantised else 1), page_tokens)


def check_pages(slots: int, page_size: int) -> None:
    """Raise ValueError unless the slots are whole pages, and at least one, which negative pages stand for."""
    if page_size < 1 or slots < 1 or slots % page_size:
        raise ValueError(f"the pool has {slots} slots, which are not one or more pages of {page_size}")
