#!/usr/bin/env python
"""Serving under load, measured as `vllm bench serve` measures it and in its words.

    .venv/bin/python scripts/bench_serving.py [--max-concurrency 1 2 4 8 16 32 64] [--save-result] [-- SERVER FLAGS]
    .venv/bin/python scripts/bench_serving.py --base-url http://127.0.0.1:8000 ...
    .venv/bin/python scripts/bench_serving.py --host-overhead [64 256 ...]

The first form starts a server of its own: --model, or the built-in tiny model, on a free port of this machine, with the
flags behind `--`. The second asks one that runs. Both send prompts of random token ids to /v1/completions, streamed: a
run for each --max-concurrency, with requests arriving at --request-rate (a Poisson process, or all at once). Of each
run vLLM's table is printed; --save-result also writes, run by run, JSON and a Markdown table, and in the end a plot.

The third form needs no server and no device: it times what a decode step costs the host, by the real scheduler and
engine over a runner without a model, in parts and per 100 requests. Its prompts are --random-input-len tokens long, and
it decodes --random-output-len steps.

Exit code: 0; 1 if a run had no success or the server failed; 2 for flags that cannot work; 130 after an interrupt.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.serving_flags import LEAST_PROMPTS, PROMPTS_A_PLACE, parse
from lib.serving_load import Load, arrivals, random_prompts
from lib.serving_metrics import summarize
from lib.serving_report import Results, markdown, run_table


class BenchError(Exception):
    """Why there is nothing to measure: for the person at the terminal. code: the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def server_url(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], None]]]:
    """Where to send requests, and what to call to see that a server of its own is still there."""
    from lib.own_server import own_server

    if given.base_url is not None:
        yield given.base_url, lambda: None
        return
    flags = [*([given.model] if given.model else []), *given.server_flags]
    if not any(flag.replace("_", "-").partition("=")[0] == "--max-num-seqs" for flag in flags):
        flags += ["--max-num-seqs", str(max(given.max_concurrency))]
    with own_server(flags) as server:
        print(f"starting a server of {given.model or 'the built-in model'}: {shlex.join(flags)}", flush=True)
        server.wait_until_ready(given.ready_timeout)
        yield server.url, server.require_alive


def vocabulary_size(given: argparse.Namespace, card: dict[str, Any]) -> int:
    """Token ids below this are the model's. Raises BenchError if that is not known. card: of /v1/models."""
    if given.vocab_size is not None:
        return given.vocab_size
    file = Path(str(card.get("root"))) / "config.json"
    try:
        return int(json.loads(file.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BenchError(
            f"the model's vocabulary is not known: {file} has none to read; give --vocab-size", code=2
        ) from None


def load_of(given: argparse.Namespace, concurrency: int, vocabulary: int) -> Load:
    """A run's requests."""
    prompts = given.num_prompts or max(LEAST_PROMPTS, PROMPTS_A_PLACE * concurrency)
    lengths = given.random_prefix_len, given.random_input_len, given.random_output_len
    return Load(prompts, vocabulary, *lengths, given.request_rate, given.burstiness, given.seed)


async def sweep(given: argparse.Namespace, url: str, results: Results | None) -> list[dict[str, Any]]:
    """A run for each concurrency; their rows. Raises BenchError if one has no success, or the load cannot run there."""
    from lib.serving_client import Ask, connect

    rows: list[dict[str, Any]] = []
    async with connect(url) as client:
        model, vocabulary = await _model(client, given)
        ask = Ask(given.endpoint, model, given.random_output_len, given.temperature, given.ignore_eos)
        for number, concurrency in enumerate(given.max_concurrency):
            load = load_of(given, concurrency, vocabulary)
            rows.append(await _run(client, ask, load, number, concurrency, given.metric_percentiles))
            print(run_table(rows[-1], given.percentile_metrics, given.metric_percentiles), flush=True)
            _warn(rows[-1])
            if results:
                results.write(about(given, model), rows, markdown(rows, given.metric_percentiles))
            if not rows[-1]["completed"]:
                raise BenchError(f"no request of the run with --max-concurrency {concurrency} succeeded")
    return rows


async def _model(client: Any, given: argparse.Namespace) -> tuple[str, int]:
    """The name of the model to ask, and its vocabulary. Raises BenchError if the load is too long for it."""
    from lib.serving_client import RequestFailed, model_card

    try:
        card = await model_card(client)
    except RequestFailed as error:
        raise BenchError(str(error)) from None
    need = given.random_prefix_len + given.random_input_len + given.random_output_len
    longest = card.get("max_model_len")
    if longest is not None and need > longest:
        raise BenchError(
            f"prompt and output have {need} tokens, but the model's limit is {longest}; "
            "lower --random-input-len, --random-output-len or --random-prefix-len",
            code=2,
        )
    is_named = given.base_url is not None and given.model is not None
    return given.model if is_named else card["id"], vocabulary_size(given, card)


async def _run(
    client: Any, ask: Any, load: Load, number: int, concurrency: int, percentiles: list[float]
) -> dict[str, Any]:
    """One run, behind a request that warms the server up; its row."""
    from lib.serving_client import complete, counters, run

    (warm_up,) = random_prompts(replace(load, prompts=1), number, 0)
    first = await complete(client, ask, warm_up, min(2, ask.max_tokens))
    if first.error is not None:
        raise BenchError(f"the first request, to warm up, failed: {first.error}")
    before = await counters(client)
    timings, seconds = await run(client, ask, random_prompts(load, number, 1), arrivals(load), concurrency)
    after = await counters(client)
    rate = None if math.isinf(load.rate) else load.rate
    row = {"max_concurrency": concurrency, "request_rate": rate, "num_prompts": load.prompts}
    row |= summarize(timings, seconds, percentiles)
    return row | {"server_counters": {name: after[name] - before.get(name, 0.0) for name in after}}


def _warn(row: dict[str, Any]) -> None:
    if row["failed"]:
        print(f"{row['failed']} requests failed; the first one: {row['first_error']}", file=sys.stderr)
    compiled = row["server_counters"].get("glm_dcp:compiles_after_warm_up_total", 0)
    if compiled:
        print(
            f"the server compiled {compiled:.0f} programs meanwhile: its times are in the figures",
            file=sys.stderr,
        )


def about(given: argparse.Namespace, model: str) -> dict[str, Any]:
    """What results were measured on, and how to measure them again."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": shlex.join([".venv/bin/python", "scripts/bench_serving.py", *given.command]),
        "model": model,
        "random_input_len": given.random_input_len,
        "random_output_len": given.random_output_len,
        "random_prefix_len": given.random_prefix_len,
        "burstiness": given.burstiness,
        "seed": given.seed,
    }


@contextlib.contextmanager
def interrupts_at_once() -> Iterator[None]:
    """asyncio's own answer to SIGINT, to cancel the main task, gets lost where a library guards its cleaning up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serving(given: argparse.Namespace, results: Results | None) -> None:
    """Both forms with a server."""
    from lib.own_server import ServerFailed

    try:
        with server_url(given) as (url, require_alive):
            try:
                with interrupts_at_once():
                    rows = asyncio.run(sweep(given, url, results))
            except BenchError:
                require_alive()  # a server that died says why
                raise
    except ServerFailed as error:
        raise BenchError(str(error)) from None
    if results:
        try:
            results.draw(rows, given.metric_percentiles)
        except ImportError as error:
            print(
                f"no plot: {error}; the extra [plot] installs it: {sys.executable} -m pip install -e '.[plot]'",
                file=sys.stderr,
            )


def host_overhead(given: argparse.Namespace, results: Results | None) -> None:
    """The form without a server."""
    from lib import host_overhead as overhead

    rows: list[dict[str, Any]] = []
    print("microseconds of a decode step, medians", flush=True)
    print(overhead.table([]), flush=True)
    for requests in given.host_overhead:
        for text in (False, True):
            rows.append(overhead.measure(requests, given.random_input_len, given.random_output_len, text))
            print(overhead.table(rows[-1:]).splitlines()[-1], flush=True)
            if results:
                results.write(about(given, "no model"), rows, overhead.table(rows))


def results_of(given: argparse.Namespace) -> Results | None:
    """Where results go, if they are to be saved. Raises OSError if nothing can be written there."""
    if not given.save_result:
        return None
    default = "serving.json" if given.host_overhead is None else "host-overhead.json"
    stem = (given.result_filename or default).removesuffix(".json")
    results = Results(given.result_dir or Path(), stem)
    results.check()
    return results


def main(argv: list[str] | None = None) -> int:
    given = parse(sys.argv[1:] if argv is None else argv, __doc__)
    results = None
    try:
        results = results_of(given)
        measure = serving if given.host_overhead is None else host_overhead
        measure(given, results)
    except KeyboardInterrupt:
        kept = f"; the runs before it are in {results.json}" if results and results.written else ""
        return _fail(f"interrupted{kept}", 130)
    except BenchError as error:
        return _fail(str(error), error.code)
    except OSError as error:
        return _fail(str(error), 2)
    except ModuleNotFoundError as error:
        return _fail(
            f"{error}; the extra [test] installs what this needs: {sys.executable} -m pip install -e '.[test]'",
            2,
        )
    if results:
        print(f"wrote {', '.join(map(str, results.written))}")
    return 0


def _fail(message: str, code: int) -> int:
    print(f"bench_serving: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
