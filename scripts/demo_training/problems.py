"""What the built-in model is asked: a text, a question about it, and the one right answer."""

from dataclasses import dataclass

from demo_training.words import CITIES, Sum, World

FACT = "{name}'s {item} are in box {number}."


@dataclass(frozen=True)
class Problem:
    """told: sentences before the question, anywhere among others if scattered. thought: what leads to the answer.

    shown: whether the thought is part of the answer where nothing is thought. number: the last one of the answer, which
    strict match asks for.
    """

    kind: str
    told: tuple[str, ...]
    question: str
    thought: str
    answer: str
    number: int
    shown: bool
    scattered: bool

    @property
    def full_answer(self) -> str:
        """What to say without having thought."""
        return f"{self.thought} {self.answer}" if self.shown else self.answer


def facts(world: World, count: int = 4, asked: int = 1) -> list[Problem]:
    """Things of different people in different boxes, and questions about some of them."""
    owners, items, boxes = world.names(count), world.items(count), world.numbers(count)
    return _asked(world, "facts", list(zip(owners, items, boxes, strict=True)), asked)


def shared_facts(world: World, count: int = 4, asked: int = 1) -> list[Problem]:
    """Facts of which the first that is asked for shares its owner with another, and its thing with a third."""
    owners, items = world.names(count // 2 + 1), world.items(count // 2 + 1)
    pairs = [(owners[0], items[0]), (owners[0], items[1]), (owners[1], items[0])][:count]
    others = [(owner, item) for owner in owners for item in items if (owner, item) not in pairs]
    pairs += world.rng.sample(others, count - len(pairs))
    boxes = world.numbers(count)
    return _asked(
        world, "shared facts", [(*pair, box) for pair, box in zip(pairs, boxes, strict=True)], asked
    )


def _asked(world: World, kind: str, known: list[tuple[str, str, int]], asked: int) -> list[Problem]:
    """Questions about the first ones of what is known."""
    sentences = [FACT.format(name=name, item=item, number=box) for name, item, box in known]
    told = tuple(world.rng.sample(sentences, len(sentences)))
    return [
        Problem(
            kind,
            told,
            f"Where are {name}'s {item}?",
            f"I look for {name}'s {item}.",
            answer,
            box,
            False,
            True,
        )
        for (name, item, box), answer in list(zip(known, sentences, strict=True))[:asked]
    ]


_ONE_STEP = {
    "+": (
        ("{n} has {a} {i}.", "{n} gets {b} more.", "How many {i} does {n} have now?"),
        ("{n} has {a} {i} and {m} has {b} {i}.", "How many {i} do they have together?"),
        ("There are {a} {i} on the table.", "{n} puts {b} more there.", "How many {i} are on the table?"),
        ("{n} finds {a} {i} in the morning and {b} in the evening.", "How many {i} does {n} find?"),
    ),
    "-": (
        ("{n} has {a} {i}.", "{n} gives {b} of them to {m}.", "How many {i} are left?"),
        ("{n} has {a} {i} and loses {b}.", "How many {i} does {n} have now?"),
        ("There are {a} {i} on the table.", "{n} takes {b}.", "How many {i} are on the table?"),
        ("{n} wants {a} {i} and has {b}.", "How many {i} are missing?"),
    ),
}
_MORE = {
    "+": ("Then {n} gets {b} more.", "Then {m} brings {b} more.", "Then {n} finds {b} more."),
    "-": ("Then {n} loses {b}.", "Then {n} gives {b} away.", "Then {m} takes {b}."),
}
_STARTS = ("{n} has {a} {i}.", "There are {a} {i} in {n}'s house.")


def one_step(world: World) -> Problem:
    """A word problem of one sum."""
    (one,) = world.sums(1)
    *told, question = world.one(_ONE_STEP[one.sign])
    return _word_problem(world, "one step", told, question, [one])


def two_steps(world: World) -> Problem:
    """A word problem of two sums, one after the other."""
    sums = world.sums(2)
    told = [world.one(_STARTS)]
    told += [world.one(_MORE[one.sign]).replace("{b}", str(one.b)) for one in sums]
    told[1] = told[1].removeprefix("Then ")
    return _word_problem(world, "two steps", told, "How many {i} are there now?", sums)


def _word_problem(world: World, kind: str, told: list[str], question: str, sums: list[Sum]) -> Problem:
    n, m = world.names(2)
    (item,) = world.items(1)
    words = {"n": n, "m": m, "i": item, "a": sums[0].a, "b": sums[0].b}
    thought = " ".join(f"{one}." for one in sums)
    number = sums[-1].result
    return Problem(
        kind,
        tuple(sentence.format(**words) for sentence in told),
        question.format(**words),
        thought,
        f"The answer is {number}.",
        number,
        shown=True,
        scattered=False,
    )


_FILLERS = (
    "The {a} road to {c} goes over {p}.",
    "In {c} the {s} was long and {a}.",
    "A {a} {t} sleeps behind {p}.",
    "Nobody knows why {p} is so {a}.",
    "It rains in {c}, and the {t} stays near {p}.",
    "The {t} and the {u} walk from {p} to {q}.",
    "Every {s} the {a} {t} comes back to {p}.",
    "They say that {c} is {a} in {s}.",
    "Under {p} there is a {a} cellar with a {t}.",
    "The wind blows from {p}, and the {s} is {a}.",
    "People from {c} like {p} more than {q}.",
    "Old songs tell of a {a} {t} and a {b} {u}.",
)
_WORDS = {
    "a": "quiet old green narrow cold bright empty small grey warm dusty tall".split(),
    "t": "cat dog horse fox owl goat mouse duck".split(),
    "s": "spring summer autumn winter".split(),
    "p": "the river,the forest,the market,the harbour,the school,the mill,the hill,the bridge".split(","),
    "c": CITIES,
}
_WORDS |= {"b": _WORDS["a"], "u": _WORDS["t"], "q": _WORDS["p"]}


def filler(world: World) -> str:
    """A sentence without names and numbers, which answers nothing."""
    return world.one(_FILLERS).format(**{letter: world.one(words) for letter, words in _WORDS.items()})
