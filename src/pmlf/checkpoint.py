"""Checkpoints: the state of a run in one file, tensors as safetensors and the rest as JSON in its metadata.

    checkpoint.save(path, run.state_dict())
    run.load_state_dict(checkpoint.load(path))

Nothing is unpickled, so loading a file cannot execute code. A digest of the content detects damage. Only the owner can
read the file (mode 0600): a state from which a run can resume is as private as the records.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from pmlf.basics.files import write_atomically
from pmlf.mechanism.digests import add_to, records_digest

__all__ = ["load", "records_digest", "save"]

_FORMAT = "pmlf checkpoint 1"
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself

# Containers by their names in the file. Scalars are stored as they are.
_LISTS: dict[str, type] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter}


def save(path: Path | str, state: Mapping[str, Any]) -> None:
    """Write a state to a file, atomically: after a crash the file is the old one or the new one.

    Args:
        path: the file; an existing one is replaced.
        state: nested dicts, lists and tuples of tensors, numbers, strings, booleans and None.

    Raises:
        ValueError: the state contains something else. The message names where.
        OSError: the file cannot be written. What was there before is unchanged.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "checkpoint.safetensors"
    >>> save(path, {"step": 3, "weights": torch.ones(2)})
    >>> load(path)
    {'step': 3, 'weights': tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, tensors, "state"))
    metadata = {"format": _FORMAT, "state": text, "digest": _digest(text, tensors)}
    write_atomically(Path(path), safetensors.torch.save(tensors, metadata))


def load(path: Path | str) -> dict[str, Any]:
    """Read a state that `save` wrote.

    Args:
        path: the file.

    Returns:
        The state, with every tensor on the CPU and independent of the file.

    Raises:
        ValueError: the file is damaged or not a checkpoint.
        OSError: the file cannot be read.
    """
    content = Path(path).read_bytes()  # once: metadata and tensors are of the same file
    try:
        metadata = _metadata(content)
        text, digest = metadata["state"], metadata["digest"]
        if metadata["format"] != _FORMAT:
            raise ValueError("unknown format")
        tensors = safetensors.torch.load(content)
        if _digest(text, tensors) != digest:
            raise ValueError("wrong digest")
        state = _unpacked(json.loads(text), tensors)
    except Exception as error:  # parsers of hostile bytes may raise anything
        raise ValueError(
            f"{str(path)!r} is damaged or not a checkpoint ({type(error).__name__}): restore the file from a backup"
        ) from error
    assert isinstance(state, dict)
    return state


def _packed(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A value as JSON. A copy of each tensor goes to `tensors`, and its name takes its place."""
    if isinstance(value, Tensor):
        # a contiguous copy: safetensors supports neither strides nor shared memory (tied weights)
        last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
        unique = f"{len(tensors)}:{name}"  # keys with dots could give two tensors one name
        tensors[unique] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"channels_last" if last else "tensor": unique}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        items = [[_key(key, name), _packed(item, tensors, f"{name}.{key}")] for key, item in value.items()]
        return {kind: items}
    raise ValueError(
        f"{name} has type {type(value).__name__}, which a checkpoint cannot store: use tensors, numbers, strings, "
        "booleans, None, and dicts, lists and tuples of them"
    )


def _key(key: Any, name: str) -> int | str:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        kind = type(key).__name__
        raise ValueError(f"{name} has a key of type {kind}, which a checkpoint cannot store: use int or str")
    return key


def _unpacked(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "channels_last":
        return tensors[content].contiguous(memory_format=torch.channels_last)
    if kind in _LISTS:
        return _LISTS[kind](_unpacked(item, tensors) for item in content)
    return _MAPPINGS[kind]({key: _unpacked(item, tensors) for key, item in content})


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata in the header of a safetensors file, of which `safetensors` reads only files (CONTRIBUTING.md)."""
    (length,) = struct.unpack_from("<Q", content)
    if length > min(len(content) - 8, _MOST_HEADER_BYTES):
        raise ValueError("the header is longer than the file")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    digest.update(f"{len(text)} {text}".encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        add_to(digest, tensors[name])
    return digest.hexdigest()
