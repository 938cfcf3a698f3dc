"""Which endpoint a request means, whether or not a proxy has taken --root-path away."""

from starlette.types import Scope

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Endpoints whose requests the engine runs."""


def endpoint_path(scope: Scope) -> str:
    """The request's path without the root path, as routes are matched."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path
