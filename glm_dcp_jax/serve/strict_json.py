"""Bodies of requests as UTF-8 JSON in which nothing is said twice: one of the two would be ignored."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from glm_dcp_jax.config.json_file import RepeatedKey, parse_unique_json
from glm_dcp_jax.serve.errors import ApiError, WrongBody


class StrictRoute(APIRoute):
    """A route whose requests' bodies are read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What handles a request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body. Raises JSONDecodeError for text that is none, WrongBody for anything else."""
        try:
            return parse_strictly(await self.body())
        except ApiError as error:
            raise WrongBody(error) from None


def parse_strictly(raw: bytes) -> Any:
    """The value in a body. Raises JSONDecodeError for text that is no JSON, ApiError 400 for anything else."""
    try:
        return parse_unique_json(raw.decode("utf-8-sig"))
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8, at byte {error.start}") from None
    except RepeatedKey as error:
        raise ApiError(f"{error}; give it once", param=error.key) from None
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None
