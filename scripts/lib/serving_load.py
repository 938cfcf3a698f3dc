"""What a serving benchmark asks for: random prompts of exact lengths, and when each of them arrives."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Load:
    """Requests of one run. vocabulary: token ids are below it.

    prefix_len: tokens that all prompts begin with; input_len: of each prompt's own behind them. output_len: tokens to
    generate. rate: requests/s on average, inf for all at once. burstiness: 1 is a Poisson process. seed: of prompts and
    arrivals.
    """

    prompts: int
    vocabulary: int
    prefix_len: int
    input_len: int
    output_len: int
    rate: float
    burstiness: float
    seed: int


def random_prompts(load: Load, *run: int) -> list[list[int]]:
    """Token ids of each prompt. run: numbers that tell one run of a seed from another, so that none finds the other's
    prompts in the prefix cache."""
    random = np.random.default_rng([load.seed, *run])
    prefix = random.integers(load.vocabulary, size=load.prefix_len).tolist()
    own = random.integers(load.vocabulary, size=(load.prompts, load.input_len)).tolist()
    return [prefix + tokens for tokens in own]


def arrivals(load: Load) -> list[float]:
    """Seconds from the run's start at which requests arrive, ascending.

    Gaps are gamma-distributed around 1 / rate with the burstiness as their shape: exponential, so a Poisson process, at
    1; in bursts below, and more even above.
    """
    if math.isinf(load.rate):
        return [0.0] * load.prompts
    random = np.random.default_rng(load.seed)
    gaps = random.gamma(load.burstiness, 1 / (load.rate * load.burstiness), load.prompts)
    return np.cumsum(gaps).tolist()
