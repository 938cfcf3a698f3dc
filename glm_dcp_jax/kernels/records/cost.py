"""What moving records costs where no slot is skipped. Programs read their plane's number and their slots."""

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.records.triton import encoded_rows, moved_rows


def pack_cost(planes: int, slots: int, record_bytes: int) -> Cost:
    """Records of `planes` layers at `slots` slots packed, or unpacked: it is the same."""
    moved = planes * slots * record_bytes
    return Cost(moved + _index_bytes(planes, slots, moved_rows(slots, record_bytes)), moved)


def write_cost(
    planes: int, slots: int, record: RecordFormat, itemsize: int, has_outer_scales: bool = False
) -> Cost:
    """Records of `planes` layers encoded from elements of `itemsize` bytes and written at `slots` slots."""
    rows = encoded_rows(slots)
    read = planes * slots * (record.latent_width + record.rope_width) * itemsize
    if record.quantised and has_outer_scales:
        read += 4 * planes * -(-slots // rows)
    return Cost(read + _index_bytes(planes, slots, rows), planes * slots * record.record_bytes)


def _index_bytes(planes: int, slots: int, rows: int) -> int:
    return 4 * planes * (slots + -(-slots // rows))
