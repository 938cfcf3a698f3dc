"""The server's own settings; the engine has its own in glm_dcp_jax.config."""

from dataclasses import dataclass

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine.chat_template import ChatTemplate, ChatTemplateError
from glm_dcp_jax.engine.sampling_params import MAX_LOGPROBS
from glm_dcp_jax.serve.metric_table import DEFAULT_PREFIX, check_prefix
from glm_dcp_jax.serve.parsing.parsers import CHOICES

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServerSettings:
    """Raises ConfigError for a value that cannot work.

    served_model_names: what requests may call the model; the first is what answers and metrics call it.
    api_keys: empty lets everyone in. chat_template: jinja source instead of the checkpoint's.
    reasoning_parser, tool_call_parser: one of parsers.CHOICES. metrics_prefix: before the names of metrics that
    vLLM has too.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    max_logprobs: int = MAX_LOGPROBS
    log_level: str = "info"
    metrics_prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("served_model_name must hold at least one name, and no empty one")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 (any free one) to 65535, but is {self.port}")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs must be from 0 to {MAX_LOGPROBS}, but is {self.max_logprobs}")
        for name in ("reasoning_parser", "tool_call_parser"):
            if getattr(self, name) not in CHOICES:
                raise ConfigError(f"{name} must be {', '.join(CHOICES)}, but is {getattr(self, name)!r}")
        if not all(self.api_keys):
            raise ConfigError("api_key must not be empty")
        if not all(key.isascii() for key in self.api_keys):
            raise ConfigError("api_key must be ASCII text, as that is all HTTP headers can hold")
        check_prefix(self.metrics_prefix)
        if self.chat_template is not None:
            try:
                ChatTemplate(self.chat_template)  # better now than at the first request
            except ChatTemplateError as error:
                raise ConfigError(f"--chat-template: {error}") from None
