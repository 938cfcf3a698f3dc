"""The response that a request's journey sends, and how it ended."""

import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm_dcp_jax.serve.disconnect import while_connected
from glm_dcp_jax.serve.errors import ApiError, ClientGone, internal_error
from glm_dcp_jax.serve.router.context import RouterContext
from glm_dcp_jax.serve.router.journey import Journey
from glm_dcp_jax.serve.router.legs import explain
from glm_dcp_jax.serve.router.reply import Reply

_LOG = logging.getLogger(__name__)


class JourneyAnswer(Response):
    """Runs a journey as long as the client is there, and the router is to."""

    def __init__(self, context: RouterContext, journey: Journey, request_id: str) -> None:
        super().__init__()
        self._context, self._journey, self._request_id = context, journey, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send whatever comes of it, if only an error."""
        reply = Reply(send, self._request_id)
        outcome = "disconnected"
        try:
            status = await while_connected(receive, self._context.stopping, self._journey.run(reply))
            outcome = outcome_of(status)
        except ClientGone:
            pass
        except ApiError as error:
            outcome = self._outcome_of_error(error, reply)
            why = f" ({explain(error.__cause__)})" if error.__cause__ else ""
            _LOG.warning("request %s: %s%s", self._request_id, error.message, why)
            await reply.fail(error)
        except Exception:
            outcome = "broken" if reply.started else "failed"
            _LOG.exception("request %s failed", self._request_id)
            await reply.fail(internal_error())
        finally:
            self._context.metrics.finished(outcome)
            _LOG.info("request %s: %s", self._request_id, outcome)

    def _outcome_of_error(self, error: ApiError, reply: Reply) -> str:
        if self._context.stopping.is_set():
            return "stopped"
        return "broken" if reply.started else outcome_of(error.status)


def outcome_of(status: int) -> str:
    """One of metrics.OUTCOMES, of an answer that is complete."""
    if status == 504:
        return "timeout"
    return "failed" if status >= 500 else "rejected" if status >= 400 else "ok"
