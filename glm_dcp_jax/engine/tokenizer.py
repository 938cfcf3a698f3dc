"""Text to token ids and back, from a checkpoint's tokenizer.json (byte-level BPE, as all of GLM's are)."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from glm_dcp_jax.config import ConfigError, EngineConfig
from glm_dcp_jax.engine.chat_template import ChatTemplate, ChatTemplateError, glm_template, read_template

_LOG = logging.getLogger(__name__)
_GLM_TOKENS = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think>".split()
"""Whoever has these reads conversations in GLM's form."""
_TEMPLATE_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def tokenizer_source(config: EngineConfig, directory: Path) -> Path | None:
    """What an engine's tokenizer is loaded from, for a checkpoint in `directory`; None if it has none."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer:
        return Path(config.tokenizer)
    return directory if (directory / "tokenizer.json").exists() else None


class Tokenizer:
    """A byte-level tokenizer, built with `load`. Chat templates are compiled at first use and kept."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """special_tokens: what templates call `eos_token` and so on. Raises ConfigError unless byte-level."""
        _require_byte_level(backend)
        backend.no_truncation()  # tokenizer.json may ask for both; a prompt must stay what it is
        backend.no_padding()
        self._backend = backend
        self._template_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._templates: dict[str, ChatTemplate] = {}
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def load(path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, or a directory that holds one. Raises ConfigError that names the file.

        tokenizer_config.json and chat_template.jinja are read from the same directory, where they exist. If neither has
        a chat template, a tokenizer with GLM's tokens gets the built-in one.
        """
        given = Path(path)
        file = given / "tokenizer.json" if given.is_dir() else given
        if not file.is_file():
            raise ConfigError(
                f"there is no tokenizer at {file}; name another with --tokenizer, or give --skip-tokenizer-init and "
                "send token ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} is not a tokenizer.json this engine can read: {error}") from None
        settings = _read_settings(file.with_name("tokenizer_config.json"))
        try:
            loaded = Tokenizer(backend, _special_tokens(settings), _chat_template(file.parent, settings))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        if loaded.chat_template is None and all(loaded.token_id(token) is not None for token in _GLM_TOKENS):
            _LOG.info("%s has no chat template but GLM's tokens: the built-in one stands in", file.parent)
            loaded.chat_template = glm_template()
        return loaded

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that skip_special_tokens leaves out of texts."""
        return frozenset(id for id, token in self._added.items() if token.special)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that no text is cut into by merging, special or not, by their text."""
        return {token.content: id for id, token in self._added.items()}

    @cached_property
    def longest_token_bytes(self) -> int:
        """Size in bytes of the longest token: no text is longer than its tokens times this."""
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return max((len(self._look_up(id)) for id in ids), default=0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ValueError for text that UTF-8 cannot hold (a lone surrogate)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds a lone surrogate at character {error.start}") from None
        # The library's encode keeps the interpreter's lock, so a long text would stop every other thread.
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_to_bytes(id) for id in token_ids if id not in skipped).decode(
            errors="replace"
        )

    def token_to_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, perhaps a part of a character; empty for ids outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._look_up(token_id)
            if known:  # ids outside the vocabulary are endless, so they are not kept
                self._bytes[token_id] = known
        return known

    def token_id(self, text: str) -> int | None:
        """The id of the one token that `text` always becomes (an added token), if there is one."""
        id = self._backend.token_to_id(text)
        return id if id in self._added else None

    def token_to_str(self, token_id: int) -> str:
        """One token for people: its text, or OpenAI's `bytes:\\xe4\\xbd` when it is not whole characters."""
        raw = self.token_to_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. chat_template: jinja source to use instead of the checkpoint's.

        Raises ChatTemplateError when there is no template, or it fails on these messages.
        """
        named = {**self._template_tokens, **variables, "add_generation_prompt": add_generation_prompt}
        return self.template(chat_template).render(messages, **named)

    def template(self, chat_template: str | None = None) -> ChatTemplate:
        """The compiled form of jinja source, or of the checkpoint's. Raises ChatTemplateError as when it is applied."""
        source = chat_template if chat_template is not None else self.chat_template
        if source is None:
            raise ChatTemplateError("the model has no chat template; start the server with --chat-template")
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source)
        return self._templates[source]

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self._backend.get_added_tokens_decoder()

    def _look_up(self, token_id: int) -> bytes:
        try:
            token = self._backend.id_to_token(token_id)
        except OverflowError:
            return b""
        if token is None:
            return b""
        if token_id in self._added or any(character not in _BYTE_OF for character in token):
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)


def _byte_alphabet() -> dict[str, int]:
    """What byte each character of a token means.

    Byte-level BPE writes bytes as visible characters: those that are visible in Latin-1 stand for themselves,
    and U+0100 and on for the others, in order.
    """
    hidden = [byte for byte in range(256) if byte <= 0x20 or 0x7F <= byte <= 0xA0 or byte == 0xAD]
    stands_for = {byte: 0x100 + place for place, byte in enumerate(hidden)}
    return {chr(stands_for.get(byte, byte)): byte for byte in range(256)}


_BYTE_OF = _byte_alphabet()


def _require_byte_level(backend: tokenizers.Tokenizer) -> None:
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    kinds = [part["type"] for part in state.get("decoders", [state])]
    if set(kinds) - {"Fuse"} != {"ByteLevel"}:
        raise ConfigError(
            f"its decoder is {', '.join(kinds)}; only byte-level tokenizers (ByteLevel) are supported"
        )


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} must hold a JSON object, but holds {type(settings).__name__}")
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _TEMPLATE_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: one string, or several by name."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return read_template(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) for entry in template):
            raise ConfigError(
                f"{directory / 'tokenizer_config.json'}: chat_template must be a string, or a list of objects "
                "with name and template"
            )
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
