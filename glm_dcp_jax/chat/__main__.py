"""`python -m glm_dcp_jax.chat [flags]`."""

import contextlib
import io
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
        _require_output()
        message = None if sys.stdin is not None and sys.stdin.isatty() else _piped()
        with Client(options.base_url, options.api_key) as client:
            model = options.model or client.first_model()
            conversation = Conversation(client, {"model": model, **options.sampling}, options.system)
            if message is None:
                Terminal(conversation).run(f"{model} at {options.base_url}")
            else:
                Terminal(conversation).answer_once(message)
    except (ServerError, _Unusable) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # as of `| head`: whoever read it has had enough
        sys.stderr.close()
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # else the end of the process tries once more, and complains
        return _fail(_Unusable(f"standard output cannot be written: {error.strerror}"), 1)
    return 0


class _Unusable(Exception):
    """Standard input has no message, or standard output takes no answer."""


def _require_output() -> None:
    """What an answer may hold and the output's encoding does not is shown as `?`."""
    if sys.stdout is None:
        raise _Unusable("standard output is closed, so no answer could be shown")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _piped() -> str:
    try:
        text = "" if sys.stdin is None else sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise _Unusable(f"standard input is not UTF-8: {error}") from None
    if not text:
        raise _Unusable("there is no message on standard input")
    return text


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
