"""What a decode step of GLM-5.2 waits for on GPUs that are not here, as JSON; `--help` lists the flags."""

import sys

from lib.interrupt import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt("dcp_schedule")
    from glm_dcp_jax.plan.decode_command import main  # loads jax, which takes seconds

    sys.exit(main())
