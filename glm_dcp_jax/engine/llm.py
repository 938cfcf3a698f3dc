"""Offline inference, with vLLM's names: `LLM(model=...).generate(prompts, sampling_params)`."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from glm_dcp_jax.config import ConfigError, engine_config
from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.environment import prepare

if TYPE_CHECKING:
    import numpy as np

    from glm_dcp_jax.engine.capture import Capture

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class LLM:
    """An engine for batches of prompts. Keyword arguments are the server's flags with underscores."""

    def __init__(self, model: str | PathLike[str], **settings: Any) -> None:
        """Load a checkpoint directory (or a name in the local Hugging Face cache).

        Raises ConfigError for settings that cannot work, ModelNotFound, and CheckpointError.
        """
        config = engine_config(str(model), **settings)
        prepare(config.parallel.tensor_parallel_size)
        from glm_dcp_jax.engine.engine import Engine  # loads jax, so only after prepare()

        self.engine = Engine.from_config(config)
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs are in the prompts' order. One SamplingParams serves all, or one for each;

        None takes the checkpoint's defaults.

        Raises ValueError for a prompt that cannot run; then nothing is generated.
        """
        many = _as_list(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise ValueError(
                f"{len(many)} prompts came with {len(each)} sampling_params; give one, or one for each"
            )
        encoded = [self._encode(prompt) for prompt in many]
        for _, ids in encoded:
            self.engine.check_prompt(ids)
        return self._run(encoded, each, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Render one conversation, or several, with the chat template, and continue them."""
        tokenizer = self._tokenizer()
        several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        texts = [
            tokenizer.apply_chat_template(
                list(conversation), chat_template, add_generation_prompt, **(chat_template_kwargs or {})
            )
            for conversation in several
        ]
        ids = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]
        return self.generate(ids, sampling_params, use_tqdm)

    def compute_logits(self, token_ids: Sequence[int], capture: bool = False) -> "np.ndarray | Capture":
        """float32 logits [tokens, vocab] of every position, through the paged cache; with `capture`, a Capture.

        Needs no tokenizer. Raises ValueError for tokens outside the vocabulary or too many of them.
        """
        from glm_dcp_jax.engine.capture import compute_logits

        return compute_logits(self.engine, list(token_ids), capture)

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config.json suggests."""
        return SamplingParams(**self.engine.sampling_defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer()

    def _run(
        self, encoded: list[tuple[str | None, list[int]]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        names = [str(self._next_id + place) for place in range(len(encoded))]
        self._next_id += len(names)
        done: dict[str, RequestOutput] = {}
        try:
            for name, (text, ids), wanted in zip(names, encoded, params, strict=True):
                self.engine.add_request(name, ids, wanted, text)
            with tqdm(total=len(names), desc="Processed prompts", disable=not use_tqdm) as bar:
                while self.engine.has_unfinished:
                    for output in self.engine.step():
                        if output.finished:
                            done[output.request_id] = output
                            bar.update()
        finally:
            for name in names:
                self.engine.abort(name)
        return [done[name] for name in names]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), [int(token) for token in prompt["prompt_token_ids"]]
            if isinstance(prompt.get("prompt"), str):
                return self._encode(prompt["prompt"])
            raise ValueError('a prompt dict needs "prompt" (text) or "prompt_token_ids" (a list of ids)')
        if isinstance(prompt, str):
            return prompt, self._tokenizer().encode(prompt)
        return None, [int(token) for token in prompt]

    def _tokenizer(self) -> Any:
        if self.engine.tokenizer is None:
            raise ConfigError(
                "this model was loaded without a tokenizer; pass token ids, or set tokenizer to a tokenizer.json"
            )
        return self.engine.tokenizer


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many: a bare string, dict or list of ints is one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    many = list(prompts)
    return [many] if many and all(isinstance(entry, Integral) for entry in many) else many
