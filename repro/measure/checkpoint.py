"""Checkpoints of a training run: written whole or not at all, and checked when read."""

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from repro.measure.files import regular, replacing


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or belongs to another training run."""


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state (of model, optimizer, controller, ...) with its checksum.

    The new file replaces the old one only once it is complete. Of several processes only one
    writes. The state consists of plain numbers, texts, lists, dictionaries and tensors.

    Raises:
        CheckpointError: The state holds something else; the old checkpoint stays.
        OSError: The file cannot be written (`NotAFileError`: not a regular file); the old one
            stays.
    """
    buffer = io.BytesIO()
    try:
        torch.save(dict(state), buffer)
        torch.load(io.BytesIO(payload := buffer.getvalue()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"the state holds what cannot be read again safely ({str(error).splitlines()[0]}); "
            "give plain numbers, texts, lists, dictionaries and tensors"
        ) from error
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        # torch would load a file with a flipped bit without an error.
        file.write(hashlib.sha256(payload).digest())
        file.write(payload)


def load_checkpoint(path: str | os.PathLike[str], device: str = "cpu") -> dict[str, Any]:
    """Read a checkpoint written by `save_checkpoint`, with its tensors on `device`.

    Raises:
        CheckpointError: The file is damaged, or not a checkpoint of `save_checkpoint`.
        FileNotFoundError: The file does not exist.
        NotAFileError: The path is a folder, a pipe or a device.
    """
    whole = regular(path).read_bytes()
    try:
        if hashlib.sha256(whole[32:]).digest() != whole[:32]:
            raise EOFError
        state: dict[str, Any] = torch.load(io.BytesIO(whole[32:]), device, weights_only=True)
    except (pickle.UnpicklingError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{os.fspath(path)} is damaged, or no checkpoint of repro: remove it to start anew, or "
            "give another path"
        ) from error
    return state
