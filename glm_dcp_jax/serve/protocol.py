"""The bodies of requests, as OpenAI and vLLM name their fields. Ranges are SamplingParams' to check."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    StrictFloat,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from glm_dcp_jax.config import SamplingDefaults
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.structured import structured_outputs_of
from glm_dcp_jax.serve.unsupported import refuse_unsupported

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


def _text(value: Any) -> str:
    """The text of a message: a string, or a list of text parts, which are joined by newlines (as in vLLM)."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                'only text is supported, as a string or as parts {"type": "text", "text": "..."}'
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _refuse(param: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})


class Body(BaseModel):
    """An object of a request. Null is as good as absent; unknown fields are ignored, unsupported ones refused."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        refuse_unsupported(fields, cls.model_fields)
        return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


class Request(Body):
    """Any request. model: None takes the one there is."""

    model: str | None = None


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


class GenerationRequest(Request):
    """What completions and chat have in common. None stands for SamplingParams' default.

    response_format, structured_outputs, guided_*: what the output must look like, one of them. priority: lower runs
    first, where the engine schedules by it. cache_salt: only requests with the same one share what
    the prefix cache holds. kv_transfer_params: where another engine holds the prompt's cache, or that it is to be held
    here for another.
    """

    n: StrictInt | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    seed: StrictInt | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    logit_bias: dict[str, StrictFloat] | None = None
    bad_words: Annotated[list[str] | None, PlainValidator(_strings, json_schema_input_type=list[str])] = None
    allowed_token_ids: list[StrictInt] | None = None
    prompt_logprobs: StrictInt | None = None
    stop: Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str])] = []
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: StrictInt = 0
    cache_salt: str = Field("", min_length=1)
    kv_transfer_params: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    _structured: StructuredOutputs | None = PrivateAttr(None)
    _structured_by: str = PrivateAttr("")

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options and not self.stream:
            raise _refuse("stream_options", "can only be given when stream is true")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> "GenerationRequest":
        if self.prompt_logprobs is not None and self.stream:
            raise _refuse("prompt_logprobs", "are not available when stream is true")
        return self

    @model_validator(mode="after")
    def _structured_outputs_are_one(self) -> "GenerationRequest":
        self._structured, self._structured_by = structured_outputs_of(self.__dict__)
        return self

    @property
    def structured_by(self) -> str:
        """The field that asks for structured outputs; empty if none does."""
        return self._structured_by

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
        self, defaults: SamplingDefaults, max_tokens: int, logprobs: int | None, detokenize: bool
    ) -> SamplingParams:
        """defaults: for fields left open. Raises ApiError 400 for a value out of range."""
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
                structured_outputs=self._structured,
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

    @model_validator(mode="after")
    def _one_cache_one_prompt(self) -> "CompletionRequest":
        if self.kv_transfer_params and len(self.prompt) > 1:
            raise _refuse(
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


class Message(Body):
    """One turn of a conversation. reasoning_content: what an assistant thought, for templates that show it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_text, json_schema_input_type=str | list[dict[str, Any]])]
    reasoning_content: str | None = None
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """What the chat template sees. `developer` is OpenAI's newer name for `system`; templates know only that."""
        fields = self.model_dump(exclude_none=True)
        return {**fields, "role": "system"} if self.role == "developer" else fields


class Conversation(Request):
    """Messages, and how the chat template makes a prompt of them."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _reserved_names(self) -> "Conversation":
        reserved = {"messages", "chat_template", "add_generation_prompt", "tools", "documents", "self"}
        for name in sorted(reserved & set(self.chat_template_kwargs or {})):
            raise _refuse("chat_template_kwargs", f"must not hold {name}")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template gets besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}


class ChatRequest(GenerationRequest, Conversation):
    """POST /v1/chat/completions. top_logprobs: alternatives to report per token, when logprobs is true."""

    max_completion_tokens: StrictInt | None = None
    logprobs: bool = False
    top_logprobs: StrictInt | None = None
    add_special_tokens: bool = False


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
        if (self.prompt is None) == (not self.messages):
            raise _refuse("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Request):
    """POST /detokenize."""

    tokens: list[Annotated[StrictInt, Field(ge=0)]]
