"""The server's own settings; the engine has its own in glm_dcp_jax.config."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine.chat_template import ChatTemplate, ChatTemplateError
from glm_dcp_jax.engine.sampling_params import MAX_LOGPROBS
from glm_dcp_jax.serve.draining import check_patience
from glm_dcp_jax.serve.metric_table import DEFAULT_PREFIX, check_prefix
from glm_dcp_jax.serve.parsing.parsers import CHOICES

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_ANY = ("*",)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What a method or a header's name is made of."""
_ROOT_PATH = re.compile(r"(?!/(v1|metrics|health|docs)(/|$))(/(?!\.\.?(/|$))[A-Za-z0-9._~-]+)+")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ServerSettings:
    """Raises ConfigError for a value that cannot work.

    served_model_names: what requests may call the model; the first is what answers and metrics call it.
    api_keys: empty lets everyone in. chat_template: jinja source instead of the checkpoint's. reasoning_parser,
    tool_call_parser: one of parsers.CHOICES. shutdown_timeout: seconds that what runs may go on after a signal.
    sse_keep_alive_interval: seconds without an event after which a stream gets a comment; 0 for never. allowed_origins:
    whose pages may use the server; the other three say how. root_path: where a proxy shows the server. profiler_dir:
    where traces go; None for no profiler. metrics_prefix: before the names of metrics that vLLM has too.
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
    log_format: str = "text"
    enable_log_requests: bool = False
    disable_uvicorn_access_log: bool = False
    disable_log_stats: bool = False
    shutdown_timeout: float = 5.0
    sse_keep_alive_interval: float = 0.0
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = _ANY
    allowed_headers: tuple[str, ...] = _ANY
    root_path: str = ""
    profiler_dir: str | None = None
    metrics_prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("served_model_name must hold at least one name, and no empty one")
        for name in self.served_model_names:
            if not name.isprintable() or name != name.strip():
                raise ConfigError(
                    f"served_model_name must be Unicode text of one line, with no space at its ends, but holds {name!r}"
                )
        if not self.host.strip():
            raise ConfigError("host is empty; name an address of this machine, or 0.0.0.0 for all of them")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 (any free one) to 65535, but is {self.port}")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            unlimited = "; vLLM's -1, no limit, cannot be had" if self.max_logprobs == -1 else ""
            raise ConfigError(
                f"max_logprobs must be from 0 to {MAX_LOGPROBS}, but is {self.max_logprobs}{unlimited}"
            )
        for name in ("reasoning_parser", "tool_call_parser"):
            if getattr(self, name) not in CHOICES:
                raise ConfigError(f"{name} must be {', '.join(CHOICES)}, but is {getattr(self, name)!r}")
        if not all(self.api_keys):
            raise ConfigError("api_key must not be empty")
        if not all(key.isascii() for key in self.api_keys):
            raise ConfigError("api_key must be ASCII text, as that is all HTTP headers can hold")
        if not all(key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ConfigError(
                "api_key must have no line end or control character, and no space at its ends: no HTTP header could "
                "hold it"
            )
        check_patience("shutdown_timeout", self.shutdown_timeout)
        check_patience("sse_keep_alive_interval", self.sse_keep_alive_interval)
        self._check_origins()
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path must be a path such as /glm, not one of the server's own, of letters, digits, - . _ and ~, "
                f"with no slash at its end, but is {self.root_path!r}"
            )
        if self.profiler_dir == "":
            raise ConfigError("profiler_dir is empty; name a directory, or leave it out")
        check_prefix(self.metrics_prefix)
        if self.chat_template is not None:
            try:
                ChatTemplate(self.chat_template)  # better now than at the first request
            except ChatTemplateError as error:
                raise ConfigError(f"--chat-template: {error}") from None

    @property
    def named_parsers(self) -> dict[str, str]:
        """Parsers that were asked for, by the flag."""
        names = ("reasoning_parser", "tool_call_parser")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in ("auto", "none")}

    def require_no_parser(self, why: str) -> None:
        """Raise ConfigError for a parser that was asked for where there is no tokenizer. why: there is none."""
        for name, choice in self.named_parsers.items():
            raise ConfigError(
                f"{name} {choice} needs a tokenizer, and {why}; give one with --tokenizer, or use auto or none"
            )

    def _check_origins(self) -> None:
        if not self.allowed_origins:
            for name in ("allow_credentials", "allowed_methods", "allowed_headers"):
                if getattr(self, name) not in (False, _ANY):
                    raise ConfigError(f"{name} says nothing without allowed_origins; give both, or neither")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _is_origin(origin):
                raise ConfigError(
                    f"allowed_origins must hold origins such as https://chat.example.org, or *, but holds {origin!r}"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials must not be given to all origins: every page that a user opens could then act for "
                "that user; name the origins in allowed_origins"
            )
        for name in ("allowed_methods", "allowed_headers"):
            for word in getattr(self, name):
                if not _TOKEN.fullmatch(word):
                    raise ConfigError(f"{name} must hold names, or *, but holds {word!r}")
        for method in self.allowed_methods:
            if method != method.upper():
                raise ConfigError(
                    f"allowed_methods must be in capitals, as {method.upper()}, but holds {method!r}"
                )


def _is_origin(text: str) -> bool:
    """Whether it is a scheme, a host and perhaps a port, as browsers send it: xn--a for ä, no port that is clear."""
    try:
        parts = urlsplit(text)
        is_clear = parts.port == _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return False
    if is_clear or "*" in text or not text.isascii():
        return False
    return bool(parts.hostname) and text == f"{parts.scheme}://{parts.netloc}" and "@" not in text
