"""`python -m glm_dcp_jax.plan`: what a model needs on GPUs that are not here."""

import sys
from collections.abc import Sequence

from jax.errors import JaxRuntimeError

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.model.safetensors_reader import CheckpointError
from glm_dcp_jax.plan import flags, picture, report, table
from glm_dcp_jax.plan.output import put_out


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Returns the exit code: 2 for flags that cannot be, 1 for what XLA cannot compile, else put_out's,
    whether or not it fits."""
    environment.prepare(1)
    try:
        options = flags.parse(sys.argv[1:] if argv is None else argv)
        if options.png is not None:
            picture.check(options.png)
        found = report.answer(options)
        if options.png is not None:
            picture.draw(found, options.png)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {flags.explain(ConfigError(str(error)))}", file=sys.stderr)
        return 2
    except JaxRuntimeError as error:  # of a GPU that is not built in, say, which XLA does not know
        print(
            f"error: XLA cannot compile for {options.target}: {str(error).splitlines()[0]}", file=sys.stderr
        )
        return 1
    return put_out(table.as_json(found) if options.json else table.as_text(found, options.floor))


if __name__ == "__main__":
    sys.exit(main())
