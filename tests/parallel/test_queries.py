"""The decode plan: what a rank owns of a selection, packed to the front."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.parallel.queries import _packed

packed = jax.jit(_packed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 9), min_size=7, max_size=7), min_size=3, max_size=3))
def test_slots_keep_their_order_and_come_first(rows):
    found = np.asarray(packed(np.array(rows, np.int32)))
    for row, result in zip(rows, found.tolist(), strict=True):
        kept = [slot for slot in row if slot >= 0]
        assert result == kept + [-1] * (len(row) - len(kept))
