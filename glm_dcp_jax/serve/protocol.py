"""The bodies of requests, as OpenAI and vLLM name their fields. Ranges are SamplingParams' to check."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, PrivateAttr, StrictFloat, StrictInt, model_validator

from glm_dcp_jax.config import SamplingDefaults
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.serve.body import Body, Request, refuse
from glm_dcp_jax.serve.conversation import Conversation, Message
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.structured import structured_outputs_of
from glm_dcp_jax.serve.unsupported import NOTHING

Prompt = str | list[int]
"""A prompt as text or as token ids."""
_MOST_STRINGS = 1000
"""Of `stop` and of `bad_words`: each is looked for at every token."""


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several, each a text or a list of token ids, as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_token, value))):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if all(isinstance(prompt, list) and all(map(_is_token, prompt)) for prompt in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of such lists; none empty"
    )


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _stop(value: Any) -> list[str]:
    return _strings([value] if isinstance(value, str) else value, "a string or a list of strings")


def _strings(value: Any, allowed: str = "a list of strings") -> list[str]:
    if not isinstance(value, list) or not all(isinstance(string, str) for string in value):
        raise ValueError(f"must be {allowed}")
    if len(value) > _MOST_STRINGS:
        raise ValueError(f"must be at most {_MOST_STRINGS} strings, but is {len(value)}")
    return value


class StreamOptions(Body):
    """include_usage: one more chunk at the end, with the token counts."""

    include_usage: bool = False


_SAMPLING = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
)
"""Fields that go to SamplingParams as they are."""


class SamplingRequest(Request):
    """What all requests that generate have in common. None stands for SamplingParams' default.

    structured_outputs: what the output must look like. priority: lower runs first, where the engine schedules by it.
    cache_salt: only requests with the same one share what the prefix cache holds. request_id: what the answer's id
    holds, unless there is a header X-Request-Id.
    """

    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    seed: StrictInt | None = None
    min_tokens: StrictInt | None = None
    logit_bias: dict[str, StrictFloat] | None = None
    bad_words: Annotated[list[str] | None, PlainValidator(_strings, json_schema_input_type=list[str])] = None
    allowed_token_ids: list[StrictInt] | None = None
    stop: Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str])] = []
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    priority: StrictInt = 0
    cache_salt: str = Field("", min_length=1)
    request_id: str | None = None
    stream: bool = False


class GenerationRequest(SamplingRequest):
    """What completions and chat have in common.

    response_format, structured_outputs, guided_*: what the output must look like, one of them. kv_transfer_params:
    where another engine holds the prompt's cache, or that it is to be held here for another.
    """

    n: StrictInt | None = None
    max_tokens: StrictInt | None = None
    prompt_logprobs: StrictInt | None = None
    return_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    _structured: StructuredOutputs | None = PrivateAttr(None)
    _structured_by: str = PrivateAttr("")

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options and not self.stream:
            raise refuse("stream_options", "can only be given when stream is true")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> "GenerationRequest":
        if self.prompt_logprobs is not None and self.stream:
            raise refuse("prompt_logprobs", "are not available when stream is true")
        return self

    @model_validator(mode="after")
    def _structured_outputs_are_one(self) -> "GenerationRequest":
        self._structured, self._structured_by = structured_outputs_of(self.__dict__)
        return self

    @property
    def structured(self) -> StructuredOutputs | None:
        """What the output must look like."""
        return self._structured

    @property
    def structured_by(self) -> str:
        """The field that asks for structured outputs; empty if none does."""
        return self.called(self._structured_by)

    def called(self, field: str) -> str:
        """What the client calls a field: its name, unless this request was made from one of another API."""
        return field

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def needs_prompt_logprobs(self) -> int | None:
        """The alternatives that the engine must report for each prompt token; None for no report."""
        return self.prompt_logprobs

    def require_tokenizer(self, tokenizer_for: Callable[[str, str], Any]) -> None:
        """Call `tokenizer_for(what, param)`, which raises if there is none, for each text that the output meets."""
        if self.stop:
            tokenizer_for("a stop string", "stop")
        if self._structured is not None:
            tokenizer_for("a structured output", self._structured_by)
        if self.bad_words:
            tokenizer_for("a bad word", "bad_words")

    def sampling_params(
        self,
        defaults: SamplingDefaults,
        max_tokens: int,
        logprobs: int | None,
        detokenize: bool,
        marked_token_ids: Sequence[int] = (),
        structured_outputs: StructuredOutputs | None = None,
    ) -> SamplingParams:
        """defaults: for fields left open. marked_token_ids, structured_outputs: as in SamplingParams.

        Raises ApiError 400 for a value out of range.
        """
        sampling: dict[str, Any] = {name: value for name, value in defaults.items() if name != "max_tokens"}
        sampling |= {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        try:
            return SamplingParams(
                **sampling,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=self.needs_prompt_logprobs,
                stop=self.stop,
                ignore_eos=self.ignore_eos,
                include_stop_str_in_output=self.include_stop_str_in_output,
                skip_special_tokens=self.skip_special_tokens,
                detokenize=detokenize,
                structured_outputs=structured_outputs,
                marked_token_ids=list(marked_token_ids),
                extra_args={"kv_transfer_params": self.kv_transfer_params}
                if self.kv_transfer_params
                else None,
            )
        except ParameterError as error:
            raise ApiError(str(error), param=error.field) from error


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. logprobs: alternatives to report per token. echo: the prompt before each output.

    An echoed prompt has logprobs if the output has. With echo max_tokens may be 0: then only the prompt comes back.
    """

    prompt: Annotated[
        list[Prompt],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: StrictInt | None = None
    echo: bool = False
    add_special_tokens: bool = True
    unsupported = {
        "chat_template_kwargs": NOTHING,
        "max_completion_tokens": (None,),
        "messages": NOTHING,
        "reasoning_effort": (None,),
        "thinking": (None,),
        "top_logprobs": NOTHING,
    }

    @model_validator(mode="after")
    def _one_cache_one_prompt(self) -> "CompletionRequest":
        if self.kv_transfer_params and len(self.prompt) > 1:
            raise refuse(
                "kv_transfer_params", "are for one prompt; send each of several in a request of its own"
            )
        return self

    @property
    def needs_prompt_logprobs(self) -> int | None:
        """As many as of the output's tokens, where the prompt is echoed with logprobs."""
        echoed = self.logprobs if self.echo else None
        return echoed if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def prompt_only(self) -> bool:
        """Whether nothing but the prompt comes back."""
        return self.echo and self.max_tokens == 0


class ChatRequest(GenerationRequest, Conversation):
    """POST /v1/chat/completions. top_logprobs: alternatives to report per token, when logprobs is true.

    parallel_tool_calls: whether a turn may make more than one call. include_reasoning: whether it comes back.
    """

    max_completion_tokens: StrictInt | None = None
    logprobs: bool = False
    top_logprobs: StrictInt | None = None
    add_special_tokens: bool = False
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    unsupported = {"prompt": NOTHING}


class ReleaseRequest(Body):
    """POST /v1/kv_transfer/release. kv_transfer_params: as the producer's answer had them."""

    kv_transfer_params: dict[str, Any]


class TokenizeRequest(Conversation):
    """POST /tokenize of a text or a conversation. add_special_tokens: None adds them to texts only."""

    messages: list[Message] = []
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if ("prompt" in self.model_fields_set) == ("messages" in self.model_fields_set):
            raise refuse("prompt", "give either prompt or messages")
        if self.prompt is None and not self.messages:
            raise refuse("messages", "must be at least one")
        return self


class DetokenizeRequest(Request):
    """POST /detokenize."""

    tokens: list[Annotated[StrictInt, Field(ge=0)]]
