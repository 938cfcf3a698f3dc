"""`python -m glm_dcp_jax.serve.pair [MODEL] [flags]`."""

import sys
from collections.abc import Sequence

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve import logs
from glm_dcp_jax.serve.pair import flags, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a pair. Returns the exit code: that of `run`, 1 if it cannot start, 2 for a wrong command line."""
    try:
        command = flags.parse(sys.argv[1:] if argv is None else argv, environment.has_nvidia_gpu())
    except ConfigError as error:
        return _fail(error, 2)
    logs.configure(command.log_level)
    try:
        return run.run(command)
    except ConfigError as error:
        return _fail(error, 1)


def _fail(error: ConfigError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
