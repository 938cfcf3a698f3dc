"""Flags of vLLM's and SGLang's servers that ours does not have: what is said of them, and which of them do no harm."""

import argparse
from collections.abc import Mapping, Sequence

from glm_dcp_jax.config import REFUSED, ConfigError
from glm_dcp_jax.config.flags import JSON_FLAGS, explain_unknown, option_of
from glm_dcp_jax.config.refused import SO_ANYWAY, Value, is_so_anyway

REFUSED_HERE = {
    "chat_template_content_format": "messages reach the template as plain strings",
    "disable_frontend_multiprocessing": "the process that drives the mesh answers requests",
    "disable_log_requests": "requests are logged with --enable-log-requests only; leave it out",
    "enable_prompt_tokens_details": "usage always has prompt_tokens_details",
    "enable_request_id_headers": "answers always have X-Request-Id; leave it out",
    "enable_server_load_tracking": "/load always says the load; leave it out",
    "max_log_len": "prompts are never logged; see --enable-log-requests",
    "no_enable_auto_tool_choice": "--tool-call-parser none does that",
    "profiler_config": "use --profiler-dir",
    "reasoning_parser_plugin": "--reasoning-parser has GLM's own",
    "ssl_certfile": "put a TLS proxy in front",
    "ssl_keyfile": "put a TLS proxy in front",
    "tool_parser_plugin": "--tool-call-parser has GLM's own",
    "uds": "the server listens on --host and --port only",
    "uvicorn_log_level": "use --log-level",
}
"""As REFUSED, of the server itself."""
SO_HERE: Mapping[str, Sequence[Value]] = {
    **SO_ANYWAY,
    "disable_frontend_multiprocessing": (True,),
    "disable_log_requests": (True,),
    "enable_prompt_tokens_details": (True,),
    "enable_request_id_headers": (True,),
    "enable_server_load_tracking": (True,),
}
"""As SO_ANYWAY, with what the server does anyway."""
_SGLANG = {
    "chunked_prefill_size": "--max-num-batched-tokens",
    "context_length": "--max-model-len",
    "max_running_requests": "--max-num-seqs",
    "mem_fraction_static": "--gpu-memory-utilization",
    "model_path": "--model",
    "page_size": "--block-size",
    "tp": "-tp",
    "tp_size": "-tp",
    "dcp": "-dcp",
    "dcp_size": "-dcp",
}
_VLLM_SHORT = {
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-pcp": "prefill_context_parallel_size",
}


def full_name(name: str) -> str:
    """pipeline_parallel_size for pp, which vLLM writes -pp; other names as they are."""
    return _VLLM_SHORT.get("-" + name, name)


def spelled(name: str) -> str:
    """A flag on the command line, by its name or vLLM's short one."""
    return "-" + name if "-" + name in _VLLM_SHORT else option_of(name)


def is_so(name: str, value: object) -> bool:
    """Whether a flag's value asks for what is so anyway."""
    return is_so_anyway(name, value, SO_HERE)


def forms_taken(name: str) -> list[str]:
    """How a flag may be given although ours is no such flag: in these forms it asks for what is so anyway."""
    option = option_of(name)
    words = {True: option, False: "--no-" + option[2:]}
    return [words[so] if isinstance(so, bool) else f"{option} {so}" for so in SO_HERE.get(name, ())]


def without_what_is_so(words: Sequence[str]) -> list[str]:
    """A command line without the flags that ask for what is so anyway. Words are spelled with dashes."""
    taken = {form for name in SO_HERE for form in forms_taken(name)}
    rest: list[str] = []
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        name, equals, value = word.partition("=")
        option = option_of(_VLLM_SHORT[name]) if name in _VLLM_SHORT else name
        if not equals and option in taken:
            continue
        if equals and f"{option} {value}" in taken:
            continue
        if not equals and waiting and f"{option} {waiting[-1]}" in taken:
            waiting.pop()
            continue
        rest.append(word)
    return rest


def require_known(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Raise ConfigError for all flags that we do not have; argparse's own message would name no alternative."""
    options = parser._option_string_actions
    known = {option[2:].replace("-", "_") for option in options if option.startswith("--")}
    strange: dict[str, None] = {}
    expects_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_value = expects_value and not argument.startswith("--")
        expects_value = False
        if name in options:
            expects_value = options[name].nargs != 0 and not equals
        elif argument.startswith("-") and not is_value:
            strange[explain(name, known)] = None
            expects_value = not equals
    if strange:
        raise ConfigError("; ".join(strange))


def explain(option: str, known: set[str]) -> str:
    """Why a flag cannot be used, and what can."""
    name = _VLLM_SHORT.get(option, option.lstrip("-").replace("-", "_").partition(".")[0])
    positive = name.removeprefix("no_").removeprefix("disable_")
    for candidate in (name, positive):
        if candidate in REFUSED_HERE:
            return f"{option} is not supported: {REFUSED_HERE[candidate]}"
        if candidate in REFUSED:
            return f"{option} is not supported: {REFUSED[candidate]}"
    flag, _, key = option.partition(".")
    if key and name in JSON_FLAGS:
        return f"{flag} takes an object here, with {key!r} among its keys"
    if key and name in known:
        return f"{flag} takes one value; it has no key {key!r}"
    if name in _SGLANG:
        return f"unknown flag {option}; it is {_SGLANG[name]} here"
    return explain_unknown(name, known)
