"""API keys: a `Bearer` token on the paths that cost something or show what the model is."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from glm_dcp_jax.serve.errors import json_response
from glm_dcp_jax.serve.paths import endpoint_path

GUARDED = ("/v1", "/tokenize", "/detokenize", "/reset_prefix_cache", "/start_profile", "/stop_profile")


class RequireKey:
    """ASGI middleware: guarded paths answer 401 without one of the keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it. OPTIONS, which browsers ask without a key, shows and costs nothing."""
        if _is_guarded(scope) and not self._allowed(scope):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # Every key is compared, by hashes of one length, so the time taken says nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return kind.lower() == "bearer" and any(matches)


def _is_guarded(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] != "OPTIONS"
        and any(path.startswith(GUARDED) for path in (scope["path"], endpoint_path(scope)))
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
