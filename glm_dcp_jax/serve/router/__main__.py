"""`python -m glm_dcp_jax.serve.router --prefill URL --decode URL [flags]`."""

import sys
from collections.abc import Sequence

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve import logs
from glm_dcp_jax.serve.router import flags, run
from glm_dcp_jax.serve.run import bind


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router. Returns the exit code: 0 after a signal, 1 if it cannot start, 2 for a wrong command line."""
    try:
        settings = flags.parse(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _fail(error, 2)
    logs.configure(settings.log_level)
    try:
        listener = bind(settings.host, settings.port)
    except ConfigError as error:
        return _fail(error, 1)
    run.serve(settings, listener)
    return 0


def _fail(error: ConfigError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
