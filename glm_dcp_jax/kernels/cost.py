"""What an op moves and computes, declared as a function of its shapes: kernels are opaque to XLA."""

from typing import NamedTuple


class Cost(NamedTuple):
    """bytes_read and bytes_written: device memory, each needed byte once per program that needs it. flops: of matrix
    products, a multiply-add being two."""

    bytes_read: int
    bytes_written: int
    flops: int = 0

    @property
    def bytes_moved(self) -> int:
        """Read and written together."""
        return self.bytes_read + self.bytes_written
