"""The built-in model: a Hugging Face checkpoint of the family, with a tokenizer, that the engine runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.model.safetensors_reader import Checkpoint


def test_config_is_glm_5_2s_pattern_scaled_down(directory):
    model = ModelConfig.load(directory)
    groups = [(run.num_groups, run.sparse) for run in model.runs]
    dense, mixed, sparse = (False,), (False, True, True, True), (True, True, True, True)
    assert groups == [(2, dense), (1, mixed), (1, sparse)]
    assert model.index_topk < model.max_position_embeddings
    assert model.dtype == "bfloat16"


def test_checkpoint_opens_and_every_tensor_is_finite_and_alive(directory):
    checkpoint = Checkpoint.open(directory)
    for name in checkpoint.names():
        tensor = checkpoint.read(name).astype(np.float32)
        assert np.isfinite(tensor).all() and tensor.std() > 0, name
        bias = name.endswith("e_score_correction_bias")
        assert checkpoint.info(name).dtype == ("F32" if bias else "BF16"), name


def test_stops_are_glms(directory, tokenizer):
    stops = [tokenizer.encode(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert [[id] for id in ModelConfig.load(directory).eos_token_ids] == stops


def test_every_token_of_the_vocabulary_exists(directory, tokenizer):
    assert tokenizer.vocab_size == ModelConfig.load(directory).vocab_size
    assert all(tokenizer.token_to_bytes(id) for id in range(tokenizer.vocab_size))


@given(text=st.text(max_size=60))
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["naïve café 猫", "🦊 and 👩‍🚀!", "a\n\n  b\tc", "१२३ 45678", "<|not a token|>"]
)
def test_hard_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_common_words_take_few_tokens(tokenizer):
    assert len(tokenizer.encode("The capital of France is")) <= 10
    assert tokenizer.token_to_str(tokenizer.encode("and the house")[1]) == " the"


def test_encoding_adds_nothing_and_keeps_special_tokens_whole(tokenizer):
    ids = tokenizer.encode("[gMASK]<sop><|user|>a<|assistant|><think></think><tool_call>")
    shown = [tokenizer.token_to_str(id) for id in ids]
    assert shown == [
        "[gMASK]",
        "<sop>",
        "<|user|>",
        "a",
        "<|assistant|>",
        "<think>",
        "</think>",
        "<tool_call>",
    ]
    assert tokenizer.decode(ids) == "a<think></think><tool_call>"


@pytest.fixture(scope="module")
def llm(directory, devices) -> LLM:
    devices(2)
    return LLM(
        str(directory),
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        max_model_len=256,
        max_num_seqs=1,
        num_gpu_blocks_override=8,
    )


@pytest.fixture(scope="module")
def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_a_text_is_continued(llm, tokenizer, greedy):
    texts = ["The capital of France is", "Hello"]
    france, hello = (request.outputs[0] for request in llm.generate(texts, greedy, use_tqdm=False))
    assert len(france.token_ids) == len(hello.token_ids) == 6
    assert france.text == tokenizer.decode(france.token_ids) != hello.text
    assert france.text.isascii() and france.text.isprintable()


def test_a_conversation_is_continued(llm, tokenizer, greedy):
    switch = {"enable_thinking": False}
    (request,) = llm.chat(
        [{"role": "user", "content": "Hi"}], greedy, use_tqdm=False, chat_template_kwargs=switch
    )
    assert request.prompt_token_ids == tokenizer.encode("[gMASK]<sop><|user|>Hi<|assistant|><think></think>")
    assert len(request.outputs[0].token_ids) == 6


def test_its_network_is_healthy(llm, tokenizer):
    text = "She said that she would come at ten, and then they went home together. "
    ids = tokenizer.encode(text * 6)[:160]
    got = llm.compute_logits(ids, capture=True)
    writable = got.logits[:, got.logits.std(axis=0) > 0]
    assert 1.0 < writable.std() < 4.0
    assert np.abs(got.hidden).max() < 100.0
    for layer, selection in got.selections.items():
        assert (selection[-1] >= 0).sum() == llm.engine.model_config.index_topk < len(ids), layer
    for layer, experts in got.router_ids.items():
        assert len(np.unique(experts)) == llm.engine.model_config.n_routed_experts, layer
