"""Offline inference, with vLLM's names: `LLM(model=...).generate(prompts, sampling_params)`."""

import atexit
import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
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

        max_num_queued_reqs and max_num_queued_tokens have no effect: all prompts of a call are queued at once.

        Raises ConfigError for settings that cannot work, ModelNotFound, and CheckpointError.
        """
        config = engine_config(str(model), **settings)
        unlimited = dataclasses.replace(
            config.scheduler, max_num_queued_reqs=None, max_num_queued_tokens=None
        )
        prepare(config.devices_here, config.cache.gpu_memory_utilization)
        from glm_dcp_jax.engine.engine import Engine  # loads jax, so only after prepare()

        self.engine = Engine.from_config(dataclasses.replace(config, scheduler=unlimited))
        if self.engine.connector is not None:
            # An engine that goes takes leave of others. Registered now, so that at exit it comes before jax's own end.
            atexit.register(weakref.finalize(self.engine, self.engine.connector.close))
        self._next_id = 0
        self._one_caller = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs are in the prompts' order. One SamplingParams serves all, or one for each;

        None takes the checkpoint's defaults. priority: of each prompt; with scheduling_policy priority, lower ones run
        first.

        Raises ValueError for a prompt that cannot run; then nothing is generated.
        """
        many = _as_list(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = [params] * len(many) if isinstance(params, (SamplingParams, Mapping)) else list(params)
        for wanted in each:
            if not isinstance(wanted, SamplingParams):
                raise ValueError(
                    f"sampling_params must be SamplingParams, or a list of them, but got {wanted!r}"
                )
        if len(each) != len(many):
            raise ValueError(
                f"{len(many)} prompts came with {len(each)} sampling_params; give one, or one for each"
            )
        encoded = [self._encode(prompt) for prompt in many]
        for _, ids in encoded:
            self.engine.check_prompt(ids)
        priorities = [0] * len(many) if priority is None else list(priority)
        if len(priorities) != len(many):
            raise ValueError(f"{len(many)} prompts came with {len(priorities)} priorities; give one for each")
        with self._one_caller:
            return self._run(encoded, each, priorities, use_tqdm)

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
        if isinstance(messages, (str, Mapping)) or not messages or not all(messages):
            raise ValueError(
                "messages must be a list of messages, or a list of such lists, none of them empty"
            )
        several = messages if not isinstance(messages[0], Mapping) else [messages]
        reserved = {"messages", "add_generation_prompt"} & set(chat_template_kwargs or {})
        if reserved:
            raise ValueError(f"chat_template_kwargs may not set {sorted(reserved)}")
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

        with self._one_caller:
            return compute_logits(self.engine, _token_ids(token_ids), capture)

    def shutdown(self) -> None:
        """End what goes on with other engines: caches that are on their way here, and those that are held for others.

        Nothing can be generated afterwards. What is not shut down is when it is garbage, or when the process ends.
        """
        self.engine.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config.json suggests."""
        return SamplingParams(**self.engine.sampling_defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer()

    def _run(
        self,
        encoded: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        priorities: list[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        names = [str(self._next_id + place) for place in range(len(encoded))]
        self._next_id += len(names)
        done: dict[str, RequestOutput] = {}
        try:
            for name, (text, ids), wanted, priority in zip(names, encoded, params, priorities, strict=True):
                self.engine.add_request(name, ids, wanted, text, priority)
            with tqdm(total=len(names), desc="Processed prompts", disable=not use_tqdm) as bar:
                while self.engine.has_unfinished:
                    for progress in self.engine.step():
                        if progress.finished:
                            done[progress.request_id] = progress.output()
                            bar.update()
        finally:
            for name in names:
                self.engine.abort(name)
        return [done[name] for name in names]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = sorted(str(key) for key in prompt if key not in ("prompt", "prompt_token_ids"))
            if unknown:
                raise ValueError(
                    f'a prompt dict needs "prompt" (text) or "prompt_token_ids" (a list of ids), and holds {unknown}'
                )
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self._encode(prompt["prompt"])
            raise ValueError('a prompt dict needs "prompt" (text) or "prompt_token_ids" (a list of ids)')
        if isinstance(prompt, str):
            return prompt, self._tokenizer().encode(prompt)
        return None, _token_ids(prompt)

    def _tokenizer(self) -> Any:
        if self.engine.tokenizer is None:
            raise ConfigError(
                "this model was loaded without a tokenizer; pass token ids, or set tokenizer to a tokenizer.json"
            )
        return self.engine.tokenizer


def _token_ids(tokens: Any) -> list[int]:
    """Token ids as ints. Raises ValueError for anything but whole numbers: 1.7 and "12" are mistakes, not tokens."""
    if isinstance(tokens, (str, bytes, Mapping)) or not isinstance(tokens, Iterable):
        raise ValueError(f"token ids must be a list of integers, but got {tokens!r}")
    listed = list(tokens)
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(f"token ids must be integers, but the list holds {token!r}")
    return [int(token) for token in listed]


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many: a bare string, dict or list of ints is one. Raises ValueError for what is neither."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be text, token ids, a dict, or a list of these, but got {prompts!r}")
    many = list(prompts)
    return [many] if many and all(isinstance(entry, Integral) for entry in many) else many
