"""From the MODEL argument to the directory of a checkpoint, without ever going to the network."""

import os
from pathlib import Path


class ModelNotFound(ValueError):
    """No checkpoint directory answers to this name; the message says where it was looked for and a cure."""


def locate_model(name_or_path: str) -> Path:
    """The checkpoint directory (the one with config.json) of a path or a Hugging Face name like "org/name".

    A path that exists wins over a name. A name is looked up in the local Hugging Face cache only; nothing is
    downloaded. Raises ModelNotFound.
    """
    if not name_or_path:
        raise ModelNotFound(
            'the model is ""; give a checkpoint directory or a Hugging Face name like "org/name"'
        )
    path = Path(os.path.expanduser(name_or_path))  # unlike Path.expanduser, leaves an unknown ~user alone
    if path.is_dir():
        return _require_config(path)
    if path.exists():
        raise ModelNotFound(f"{path} is a file; give the checkpoint directory, the one with config.json")
    if name_or_path.startswith(("/", ".", "~")) or path.is_absolute() or name_or_path.count(os.sep) >= 2:
        raise ModelNotFound(
            f"there is no directory {path.absolute()}; give the checkpoint directory, which holds config.json"
        )
    return _require_config(_cached_snapshot(name_or_path))


def _require_config(directory: Path) -> Path:
    if (directory / "config.json").is_file():
        return directory
    if (directory / "config.json").is_dir():
        raise ModelNotFound(
            f"{directory / 'config.json'} is a directory, but must be the model's config.json file"
        )
    entries = sorted(entry.name for entry in directory.iterdir())
    listed = ", ".join(entries[:8]) + (f" and {len(entries) - 8} more" if len(entries) > 8 else "")
    raise ModelNotFound(
        f"{directory} is not a checkpoint directory: it has no config.json. It holds: {listed or 'nothing'}"
    )


def _cached_snapshot(name: str) -> Path:
    # Only a hub name needs the library, and importing it is slow.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # Without the pattern a snapshot that lacks, say, only its README counts as incomplete. Missing
        # weights are named when the checkpoint is opened.
        return Path(snapshot_download(name, local_files_only=True, allow_patterns="config.json"))
    except HFValidationError as error:
        raise ModelNotFound(
            f"{name!r} is neither an existing directory nor a possible Hugging Face name: {error}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{name!r} is neither an existing directory nor in the Hugging Face cache, looked for at "
            f"{constants.HF_HUB_CACHE} (set HF_HOME or HF_HUB_CACHE to change that). Nothing is downloaded "
            f"here: fetch it with `hf download {name}`, or give a checkpoint directory"
        ) from error
