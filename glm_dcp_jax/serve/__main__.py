"""`python -m glm_dcp_jax.serve [MODEL] [flags]`."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError, EngineConfig
from glm_dcp_jax.serve import flags, logs, run, tracing
from glm_dcp_jax.serve.interface import DAEMONS, Engine
from glm_dcp_jax.serve.settings import ServerSettings

_LOG = logging.getLogger("glm_dcp_jax.serve")  # not __name__: that is "__main__", whose level is not ours
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server. Returns the exit code: 0 after a signal, 1 if it cannot start, 2 for a wrong command line."""
    try:
        command = flags.parse(sys.argv[1:] if argv is None else argv, environment.has_nvidia_gpu())
    except ConfigError as error:
        return _fail(error, 2)
    logs.configure(command.settings.log_level, command.settings.log_format)
    try:
        if command.config.processes.process_id > 0:
            return _follow(command)
        if command.settings.profiler_dir is not None:
            tracing.check_directory(command.settings.profiler_dir)
        listener = run.bind(command.settings.host, command.settings.port)
        run.serve(_load(command), command.settings, listener)
    except (ConfigError, OSError, run.WarmUpFailed) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _load(command: flags.Command) -> Engine:
    """Build the engine that answers requests. jax is imported here, after its environment is set up."""
    config = _prepare(command)
    from glm_dcp_jax.engine.async_engine import AsyncEngine

    with _reported():
        _check_parsers(command.settings, config)
        engine = AsyncEngine.from_config(config)
    model = "the built-in model, whose weights are random" if command.demo else config.model
    _LOG.info("serving %s: %s", model, engine.summary)
    return engine


def _check_parsers(settings: ServerSettings, config: EngineConfig) -> None:
    """Raise ConfigError for parsers that the model is too bare for, before it is loaded."""
    from glm_dcp_jax.engine.tokenizer import tokenizer_source
    from glm_dcp_jax.model.locate import locate_model

    if settings.named_parsers and tokenizer_source(config, locate_model(config.model)) is None:
        settings.require_no_parser(f"{config.model} has no tokenizer.json")


def _follow(command: flags.Command) -> int:
    """Take part in the steps of process 0's engine until that one ends."""
    config = _prepare(command)
    from glm_dcp_jax.engine.lockstep import OutOfStep, follow

    run.leave_signals_to_process_0()
    with _reported():
        try:
            follow(config)
        except OutOfStep as error:
            return _fail(error, 1)
    return 0


def _prepare(command: flags.Command) -> EngineConfig:
    """Set up the environment for jax. Returns the engine's configuration, with a model."""
    environment.prepare(command.config.devices_here, command.config.cache.gpu_memory_utilization)
    config = command.config
    if command.demo:
        from glm_dcp_jax.demo import tiny_model_directory

        config = dataclasses.replace(config, model=str(tiny_model_directory()))
    _LOG.info("loading %s", "the built-in model" if command.demo else config.model)
    return config


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turns errors about the checkpoint into ConfigErrors."""
    from glm_dcp_jax.model.locate import ModelNotFound
    from glm_dcp_jax.model.safetensors_reader import CheckpointError

    try:
        yield
    except (ModelNotFound, CheckpointError) as error:
        raise ConfigError(str(error)) from error


def _fail(error: Exception, code: int) -> int:
    said = flags.explain(error) if isinstance(error, ConfigError) else error
    if logs.is_json():
        _LOG.error("%s", said)
    else:
        print(f"error: {said}", file=sys.stderr)
    return code


def _open_closed_streams() -> None:
    """Standard streams that were closed become /dev/null: what is opened later would take their numbers otherwise.

    XLA's messages would then be written to a client, or to the weights.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number, name in enumerate(("stdout", "stderr"), 1):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _exit(code: int) -> None:
    """Leave at once: steps that are still being compiled would be waited for, or torn down half-way, otherwise."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name in DAEMONS and thread.is_alive() for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _open_closed_streams()
    _exit(main())
