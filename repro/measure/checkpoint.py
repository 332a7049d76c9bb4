"""Checkpoints of a training: written whole or not at all, and checked when read."""

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
    """A checkpoint cannot be read, or is of another training."""


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state, such as those of model, optimizer and controller, with its checksum.

    It is written beside the old one and then takes its place, so that whatever stops it leaves one
    that can be read. On several processes only one of them writes.

    Args:
        path: The file.
        state: Plain numbers, texts, lists, dictionaries and tensors.

    Raises:
        CheckpointError: The state holds something else; the old checkpoint stays.
        OSError: The file cannot be written (`NotAFileError`: it is none); the old one stays.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    payload = buffer.getvalue()
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the state holds what cannot be read again safely ({str(error).splitlines()[0]}); "
            "give plain numbers, texts, lists, dictionaries and tensors"
        ) from error
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        # torch takes a file with a flipped bit for a good one.
        file.write(hashlib.sha256(payload).digest())
        file.write(payload)


def load_checkpoint(path: str | os.PathLike[str], device: str = "cpu") -> dict[str, Any]:
    """Read what `save_checkpoint` wrote.

    Args:
        path: The file.
        device: Where tensors come to.

    Raises:
        CheckpointError: The file is damaged, or no such checkpoint.
        FileNotFoundError: There is none.
        NotAFileError: It is a folder, a pipe or a device.
    """
    whole = regular(path).read_bytes()
    problem = (
        f"{os.fspath(path)} is damaged, or no checkpoint of repro: remove it to start anew, or "
        "give another path"
    )
    if hashlib.sha256(whole[32:]).digest() != whole[:32]:
        raise CheckpointError(problem)
    try:
        state = torch.load(io.BytesIO(whole[32:]), device, weights_only=True)
    except (pickle.UnpicklingError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(problem) from error
    if not isinstance(state, dict):
        raise CheckpointError(problem)
    return state
