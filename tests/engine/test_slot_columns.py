"""Rows of the sequences that run, written when one comes to run and when it takes pages, and at no other time."""

import numpy as np
import pytest

from glm_dcp_jax.cache.allocator import PageAllocator, PageTable
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.engine.logit_rules import LogitRules
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.slot_columns import SlotColumns

LAYOUT = Layout(4)
PLAIN = SamplingParams(temperature=0.0)


@pytest.fixture
def columns() -> SlotColumns:
    return SlotColumns(sequences=3, pages=5)


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(12)


def running(
    allocator: PageAllocator, slot: int, length: int, params: SamplingParams = PLAIN, seed: int = 0
) -> Sequence:
    """A sequence of so many tokens that was just admitted."""
    sequence = Sequence(0, [7] * length, length, length + 3, seed, params, slot=slot)
    enter(allocator, sequence)
    return sequence


def enter(allocator: PageAllocator, sequence: Sequence) -> None:
    sequence.table = PageTable(allocator, LAYOUT)
    sequence.table.grow(len(sequence.tokens))


def shown(columns: SlotColumns, slot: int, width: int = 5) -> list[int]:
    return columns.shown_pages(np.array([slot]), width)[0].tolist()


def test_the_last_row_is_nobodys(columns):
    idle = np.array([columns.idle])
    params = columns.params_of(idle)
    assert params.temperature.tolist() == [0.0] and params.step.tolist() == [0]
    assert columns.limit[idle].tolist() == columns.page_counts[idle].tolist() == [0]
    assert shown(columns, 3) == [0] * 5


def test_pages_come_as_they_are_taken_and_the_null_page_is_behind_them(columns, allocator):
    sequence = running(allocator, 1, 5)
    columns.note([sequence])
    assert shown(columns, 1) == [*sequence.pages, 0, 0, 0] and len(sequence.pages) == 2
    sequence.table.grow(17)
    columns.note([sequence])
    assert shown(columns, 1) == list(sequence.pages) and columns.page_counts[1] == 5


def test_tables_are_cut_and_padded_to_the_width_of_the_step(columns, allocator):
    sequence = running(allocator, 0, 12)
    columns.note([sequence])
    assert shown(columns, 0, 2) == list(sequence.pages[:2])
    assert shown(columns, 0, 8) == [*sequence.pages, 0, 0, 0, 0, 0]


def test_who_comes_next_into_a_slot_sees_nothing_of_who_was_there(columns, allocator):
    rules = LogitRules(SamplingParams(repetition_penalty=2.0), [7], [])
    fancy = SamplingParams(temperature=0.5, top_k=9, top_p=0.25, min_p=0.125, logprobs=2)
    first = running(allocator, 2, 20, fancy, seed=2**40 + 1)
    first.rules = rules
    columns.note([first])
    slot = np.array([2])
    found = columns.params_of(slot)
    assert [column.tolist() for column in found] == [[0.5], [9], [0.25], [0.125], [[2**8, 1]], [0]]
    assert all(flag[2] for flag in (columns.is_random, columns.is_filtered, columns.has_rules))
    assert columns.wants_logprobs[2] and columns.prompt_length[2] == 20 and columns.limit[2] == 23
    first.table.release()
    second = running(allocator, 2, 3)
    columns.note([second])
    found = columns.params_of(slot)
    assert [column.tolist() for column in found] == [[0.0], [0], [1.0], [0.0], [[0, 0]], [0]]
    assert not any(flag[2] for flag in (columns.is_random, columns.is_filtered, columns.has_rules))
    assert not columns.wants_logprobs[2] and columns.prompt_length[2] == 3 and columns.limit[2] == 6
    assert shown(columns, 2) == [*second.pages, 0, 0, 0, 0]


def test_a_preempted_sequence_that_comes_back_to_its_slot_shows_its_new_pages(columns, allocator):
    sequence = running(allocator, 0, 8)
    columns.note([sequence])
    sequence.table.release()
    blocker = running(allocator, 1, 4)
    enter(allocator, sequence)
    columns.note([sequence, blocker])
    assert shown(columns, 0)[:2] == list(sequence.pages) and shown(columns, 1)[0] == blocker.pages[0]
