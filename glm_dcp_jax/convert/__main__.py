"""`python -m glm_dcp_jax.convert SRC DST -tp 8`."""

import sys

from glm_dcp_jax.convert import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()
    from glm_dcp_jax.convert.command import (
        main,
        without_late_writes,
    )  # takes a while, in which Ctrl-C may come

    sys.unraisablehook = without_late_writes
    sys.exit(main())
