"""What a decode step of GLM-5.2 waits for on GPUs that are not here, as JSON; `--help` lists the flags."""

import sys

from glm_dcp_jax.plan.decode_command import main

if __name__ == "__main__":
    sys.exit(main())
