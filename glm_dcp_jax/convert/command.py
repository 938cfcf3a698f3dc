"""The command: flags, what is converted, and errors in a line each."""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from glm_dcp_jax import environment
from glm_dcp_jax._version import __version__
from glm_dcp_jax.config import ConfigError, ModelConfig, ParallelConfig, flags_file
from glm_dcp_jax.config.engine import DTYPE_ALIASES, DTYPES
from glm_dcp_jax.config.flags import in_flags
from glm_dcp_jax.convert.target import (
    check_space,
    check_target,
    copy_other_files,
    in_words,
    whole_or_nothing,
)
from glm_dcp_jax.progress import progress
from glm_dcp_jax.serve import logs

_ECHOES = ("absl", "asyncio")
"""Loggers of what fails in orbax's threads."""
_SPELLED = {"tensor_parallel_size": "--tensor-parallel-size"}


def main(argv: Sequence[str] | None = None) -> int:
    """Convert. Returns the exit code: 0, 1 if it cannot be done, 2 for a wrong command line."""
    parser = _parser()
    try:
        file, words = flags_file.split_off(sys.argv[1:] if argv is None else argv)
        flags = parser.parse_args([*words, *(flags_file.words_of(file, words, [parser]) if file else [])])
    except ConfigError as error:
        return _fail(str(error), 2)
    _configure_logs()
    try:
        parallel = ParallelConfig(
            tensor_parallel_size=flags.tensor_parallel_size,
            enable_expert_parallel=flags.enable_expert_parallel,
        )
        environment.prepare(parallel.tensor_parallel_size)
    except ConfigError as error:
        return _fail(in_flags(str(error), _SPELLED), 2)
    from glm_dcp_jax.model.locate import ModelNotFound
    from glm_dcp_jax.model.safetensors_reader import CheckpointError
    from glm_dcp_jax.plan.output import put_out

    try:
        done = _convert(flags, parallel)
    except (ConfigError, ModelNotFound, CheckpointError, OSError) as error:
        return _fail(in_flags(str(error), _SPELLED), 1)
    put_out(done)  # whether or not anybody can read it
    return 0


def without_late_writes(unraisable: "sys.UnraisableHookArgs") -> None:
    """A process's unraisablehook: Python's, but silent on each write that ends after orbax gave up for another."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _convert(flags: argparse.Namespace, parallel: ParallelConfig) -> str:
    """Returns what was done, in a line. jax is imported here, after its environment is set up."""
    import jax.numpy as jnp

    from glm_dcp_jax.config.quantisation import FP8_BLOCK
    from glm_dcp_jax.model import conversion
    from glm_dcp_jax.model.locate import locate_model
    from glm_dcp_jax.model.manifest import MANIFEST, Manifest
    from glm_dcp_jax.model.network import abstract_network
    from glm_dcp_jax.model.safetensors_reader import Checkpoint
    from glm_dcp_jax.model.stored_weights import StoredWeights
    from glm_dcp_jax.parallel.mesh import make_mesh
    from glm_dcp_jax.transfer.fingerprint import weights_id

    began = time.perf_counter()
    source, target = locate_model(flags.src), Path(flags.dst).expanduser()
    check_target(source, target)
    if (source / MANIFEST).exists():
        raise ConfigError(
            f"{source} is a converted checkpoint already, which loads on any mesh; give the original to convert it anew"
        )
    model, checkpoint = ModelConfig.load(source), Checkpoint.open(source)
    stored = StoredWeights(checkpoint, FP8_BLOCK if model.quantisation is None else model.quantisation.block)
    dtype = model.dtype if flags.dtype == "auto" else DTYPE_ALIASES.get(flags.dtype, flags.dtype)
    shape = abstract_network(
        model.stored_as(stored.layer_kinds(model.num_hidden_layers)),
        jnp.dtype(dtype),
        parallel.tensor_parallel_size,
        mtp=flags.mtp and conversion.has_mtp(stored, model),
        formats=stored,
        expert_parallel=parallel.enable_expert_parallel,
    )
    parts = conversion.parts_of(shape, make_mesh(parallel))
    conversion.check(stored, model, shape, parts)
    nbytes = conversion.nbytes_of(stored, parts)
    check_space(target, nbytes)
    manifest = Manifest(
        made_by=f"glm-dcp-jax {__version__}",
        tensor_parallel_size=parallel.tensor_parallel_size,
        enable_expert_parallel=parallel.enable_expert_parallel,
        dtype=dtype,
        mtp_layer=shape.mtp_layer,
        weights_id=weights_id(checkpoint),
        parts={},
    )
    with whole_or_nothing(target) as partial:
        copy_other_files(source, partial)
        with progress("Converting weights", nbytes, "B") as bar:
            made = conversion.convert_weights(stored, parts, manifest, partial, bar.update)
    seconds = time.perf_counter() - began
    written = sum(file.nbytes for part in made.parts.values() for file in part.files)
    mtp = "" if shape.mtp_layer is None else " and the MTP layer"
    return (
        f"{target}: {model.num_hidden_layers} layers{mtp}, {in_words(written)}, converted in {seconds:.1f} s "
        f"({in_words(written / seconds)}/s)"
    )


def _configure_logs() -> None:
    """Our events, and other libraries' warnings, but not errors that come back to us as exceptions all the same."""
    logs.configure("info")
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not (record.name in _ECHOES and record.exc_info))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m glm_dcp_jax.convert",
        description="Convert a checkpoint into a directory that --model takes like any other, and whose weights lie on "
        "the disk as devices hold them: stacked, padded, and cut for a number of devices. It loads on other "
        "numbers too.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("src", metavar="SRC", help="checkpoint directory, or the name of one in the local Hugging Face cache")
    add(flags_file.OPTION, metavar="FILE", help=flags_file.HELP)
    add("dst", metavar="DST", help="directory to make; it must not exist, or be empty")
    add(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="devices it will mostly be served on (default: 1)",
    )
    add(
        "--enable-expert-parallel",
        "-ep",
        action="store_true",
        help="it will mostly be served with whole experts on each device",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights that are not quantised (default: auto, the checkpoint's)",
    )
    add(
        "--no-mtp",
        dest="mtp",
        action="store_false",
        help="leave the MTP layer out, which --speculative-config needs",
    )
    return parser


def _fail(said: str, code: int) -> int:
    print(f"error: {said}", file=sys.stderr)
    return code
