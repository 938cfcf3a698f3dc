"""The producer's registry against a model that remembers everything and knows no order of calls."""

from contextlib import ExitStack
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glm_dcp_jax.transfer.offers import Held, Offers, Refused

LEASE = 30
READERS = {0: frozenset({0, 1}), 1: frozenset({1})}
LATER = {"finished": "used", "failed": "used", "expired": "expired", "dropped": "dropped"}

rarely = st.sampled_from([False] * 6 + [True])
ranks = st.frozensets(st.integers(0, 2), max_size=3)
attempts = st.sampled_from([0, 0, 0, 0, -1, 1, 2])
"""Relative to the latest."""


@dataclass
class Model:
    """acked: the consumer ranks of all acks of the present attempt, whoever they are."""

    key: str
    digest: bytes
    deadline: float
    consumer: str | None = None
    attempt: int = 0
    readers: dict[int, frozenset[int]] = field(default_factory=dict)
    acked: frozenset[int] = frozenset()
    reads: list[ExitStack] = field(default_factory=list)
    ending: str | None = None
    given_back: int = 0


class Transfers(RuleBasedStateMachine):
    """A few offers, and calls for them in any order, of any attempt and by anyone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.offers = Offers(LEASE, lambda: self.now)
        self.models: list[Model] = []
        self.late = 0
        self.refused: dict[str, int] = {}

    def draw(self, data: st.DataObject) -> Model:
        """An offer, rather one that has not ended."""
        offered = [model for model in self.models if model.ending is None]
        return data.draw(st.sampled_from(self.models if data.draw(rarely) or not offered else offered))

    def objection(self, model: Model, attempt: int | None = None) -> str | None:
        """Why the registry must refuse."""
        if model.ending:
            return LATER[model.ending]
        if self.now >= model.deadline:
            return "expired"
        if attempt is not None and (attempt < 1 or attempt != model.attempt):
            return "stale_attempt"
        return None

    def expects(self, objection: str | None, call) -> object:
        """What the call returns, which must be refused if there is an objection, and only then."""
        try:
            answer = call()
        except Refused as refused:
            assert refused.kind == objection
            self.refused[objection] = self.refused.get(objection, 0) + 1
            return None
        assert objection is None
        return answer

    def finish_if_all_acked(self, model: Model) -> bool:
        if all(readers <= model.acked for readers in model.readers.values()):
            model.ending = "finished"
        return model.ending == "finished"

    @precondition(lambda self: sum(model.ending is None for model in self.models) < 2)
    @rule(opened=st.sampled_from([True, True, False]))
    def add(self, opened: bool) -> None:
        def give_back() -> None:
            assert model.ending or self.ending_now, "still offered"
            assert not model.reads, "still read"
            model.given_back += 1

        name = str(len(self.models))
        model = Model("", name.encode(), self.now + LEASE)
        model.key = self.offers.add(Held(name, 7, model.digest, (1,), give_back))
        self.models.append(model)
        if opened:
            model.consumer, model.attempt, model.readers = "me", 1, READERS
            self.offers.open(model.key, "me", model.digest, READERS)

    ending_now = False
    """Set while a call may end an offer, which the model only notes afterwards."""

    @precondition(lambda self: self.models)
    @rule(
        data=st.data(),
        stranger=rarely,
        other_prompt=rarely,
        readers=st.dictionaries(st.integers(0, 2), ranks, max_size=3) | st.just(READERS),
    )
    def open(self, data: st.DataObject, stranger: bool, other_prompt: bool, readers: dict) -> None:
        model = self.draw(data)
        consumer = "stranger" if stranger else model.consumer or "me"
        digest = b"other" if other_prompt else model.digest
        objection = self.objection(model)
        if objection is None and model.consumer not in (None, consumer):
            objection = "used"
        if objection is None and digest != model.digest:
            objection = "other_prompt"
        self.ending_now = True
        opened = self.expects(objection, lambda: self.offers.open(model.key, consumer, digest, readers))
        self.ending_now = False
        if opened is not None:
            assert opened.attempt == model.attempt + 1
            model.consumer, model.attempt, model.readers = consumer, model.attempt + 1, readers
            model.acked = frozenset()
            self.finish_if_all_acked(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), attempt=attempts)
    def start_reading(self, data: st.DataObject, attempt: int) -> None:
        model = self.draw(data)
        attempt += model.attempt
        reading = ExitStack()
        held = self.expects(
            self.objection(model, attempt),
            lambda: reading.enter_context(self.offers.reading(model.key, attempt)),
        )
        if held is not None:
            assert held.digest == model.digest
            model.reads.append(reading)

    @precondition(lambda self: any(model.reads for model in self.models))
    @rule(data=st.data())
    def stop_reading(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([model for model in self.models if model.reads]))
        model.reads.pop(data.draw(st.integers(0, len(model.reads) - 1))).close()

    @precondition(lambda self: self.models)
    @rule(data=st.data(), attempt=attempts)
    def confirm(self, data: st.DataObject, attempt: int) -> None:
        model = self.draw(data)
        attempt += model.attempt
        self.expects(self.objection(model, attempt), lambda: self.offers.confirm(model.key, attempt))

    @precondition(lambda self: self.models)
    @rule(data=st.data(), attempt=attempts, readers=ranks, failed=rarely)
    def ack(self, data: st.DataObject, attempt: int, readers: frozenset, failed: bool) -> None:
        model = self.draw(data)
        attempt += model.attempt
        late = self.objection(model, attempt) is not None
        self.ending_now = not late
        ended = self.offers.ack(model.key, attempt, readers, not failed)
        self.ending_now = False
        if late:
            self.late += 1
            assert not ended
        elif failed:
            model.ending = "failed"
            assert ended
        else:
            model.acked |= readers
            assert ended == self.finish_if_all_acked(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), unopened=st.sampled_from([True, True, False]))
    def drop(self, data: st.DataObject, unopened: bool) -> None:
        model = self.draw(data)
        ends = model.ending is None and not (unopened and model.attempt)
        if ends:
            model.ending = "expired" if self.now >= model.deadline else "dropped"
        assert self.offers.drop(model.key, unopened=unopened) == ends

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        model = self.draw(data)
        objection = self.objection(model)
        assert self.offers.is_held(model.key) == (objection is None)
        held = self.expects(objection, lambda: self.offers.held(model.key))
        assert held is None or held.digest == model.digest

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        beaten = data.draw(st.lists(st.sampled_from(self.models), max_size=3))
        lost = [model.key for model in beaten if self.objection(model) is not None]
        for model in beaten:
            if self.objection(model) is None:
                model.deadline = max(model.deadline, self.now + LEASE * 2 // 3)
        assert self.offers.beat([model.key for model in beaten]) == lost

    @rule(seconds=st.sampled_from([1, 2, 5, 9, 19, 30]), reap=st.booleans())
    def wait(self, seconds: int, reap: bool) -> None:
        self.now += seconds
        if not reap:
            return
        over = []
        for index, model in enumerate(self.models):
            if model.ending is None and self.now >= model.deadline:
                model.ending = "expired"
                over.append(str(index))
        assert self.offers.expire() == over

    @invariant()
    def pages_come_back_once_when_ended_and_not_read(self) -> None:
        for model in self.models:
            assert model.given_back == (model.ending is not None and not model.reads)

    @invariant()
    def agrees_with_the_model(self) -> None:
        stats = self.offers.stats()
        assert stats.offered == len(self.models)
        assert stats.held == sum(not model.given_back for model in self.models)
        assert stats.late_acks == self.late
        assert stats.refused == self.refused
        for ending in LATER:
            assert getattr(stats, ending) == sum(model.ending == ending for model in self.models)
        for model in self.models:
            released = {rank for rank, readers in model.readers.items() if readers <= model.acked}
            assert self.offers.released_ranks(model.key) == released

    def teardown(self) -> None:
        for model in self.models:
            if model.ending is None:
                model.ending = "expired" if self.now >= model.deadline else "dropped"
        self.offers.close()
        for model in self.models:
            while model.reads:
                assert not model.given_back
                model.reads.pop().close()
            assert model.given_back == 1


Transfers.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestTransfers = Transfers.TestCase
