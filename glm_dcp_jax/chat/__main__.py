"""`python -m glm_dcp_jax.chat [flags]`."""

import sys
from collections.abc import Sequence

from glm_dcp_jax.chat import flags
from glm_dcp_jax.chat.client import Client, ServerError
from glm_dcp_jax.chat.conversation import Conversation
from glm_dcp_jax.chat.terminal import Terminal
from glm_dcp_jax.config import ConfigError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Chat. Returns the exit code: 0, 1 if the server does not answer, 2 for a wrong command line, 130 for Ctrl-C."""
    try:
        options = flags.parse(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _fail(error, 2)
    try:
        message = None if sys.stdin.isatty() else _piped()
        with Client(options.base_url, options.api_key) as client:
            model = options.model or client.first_model()
            conversation = Conversation(client, {"model": model, **options.sampling}, options.system)
            if message is None:
                Terminal(conversation).run(f"{model} at {options.base_url}")
            else:
                Terminal(conversation).answer_once(message)
    except (ServerError, _NoMessage) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # as of `| head`: whoever read it has had enough
        sys.stderr.close()
    return 0


class _NoMessage(Exception):
    """What was piped in is none."""


def _piped() -> str:
    try:
        text = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise _NoMessage(f"standard input is not UTF-8: {error}") from None
    if not text:
        raise _NoMessage("there is no message on standard input")
    return text


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
