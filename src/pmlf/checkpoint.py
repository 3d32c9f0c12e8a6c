"""Save and load the state of a run: tensors as safetensors, the rest as JSON, one file, whole or not at all.

    checkpoint.save(path, run.state_dict())
    run.load_state_dict(checkpoint.load(path))

Nothing is ever unpickled, so a file from elsewhere can be refused, but not run. A digest over the content tells damage.
The file is for the user alone, mode 0600: the state of a run that can go on holds what is as private as its records.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pmlf.basics.files import write_atomically

_FORMAT = "pmlf checkpoint 1"
_MOST_HEADER_BYTES = 100_000_000  # as safetensors itself allows
_RECORDS_AT_A_TIME = 1000

# Containers by the name they have in the file; scalars stand for themselves.
_LISTS: dict[str, type] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter}


def save(path: Path | str, state: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, texts, booleans and None to a file, atomically."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, tensors, "state"))
    metadata = {"format": _FORMAT, "state": text, "digest": _digest(text, tensors)}
    write_atomically(Path(path), safetensors.torch.save(tensors, metadata))


def load(path: Path | str) -> dict[str, Any]:
    """What `save` wrote, on the CPU; a file that is damaged, or is no checkpoint, is refused."""
    content = Path(path).read_bytes()
    try:
        metadata = _metadata(content)
        text, digest = metadata["state"], metadata["digest"]
        if metadata["format"] != _FORMAT:
            raise ValueError("another format")
        tensors = safetensors.torch.load(content)
        if _digest(text, tensors) != digest:
            raise ValueError("another digest")
        state = _unpacked(json.loads(text), tensors)
    except Exception as error:  # whatever a reader of hostile bytes may raise
        raise ValueError(
            f"{str(path)!r} is damaged or no checkpoint ({type(error).__name__}): put the file back as it was"
        ) from error
    assert isinstance(state, dict)
    return state


def records_digest(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, key: bytes) -> str:
    """Keyed digest of all the records of a dataset, in order: whether they changed, for those who have the key.

    The records must not be random. The digest, with its key, is as private as the records: others could test guesses.
    """
    digest = hashlib.blake2b(key=key, digest_size=32)
    loader = DataLoader(dataset, batch_size=_RECORDS_AT_A_TIME, collate_fn=collate_fn, generator=torch.Generator())
    for batch in loader:
        for leaf in _leaves(batch):
            _add(digest, leaf)
    return digest.hexdigest()


def _packed(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """JSON for a value; its tensors go to `tensors`, each a copy of its own, and leave their names."""
    if isinstance(value, Tensor):
        # contiguous and apart: safetensors knows neither strides nor shared memory (tied weights)
        last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
        unique = f"{len(tensors)}:{name}"  # keys with dots in them could make two names alike
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
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: tensors, numbers, texts, booleans, None "
        "and dicts, lists and tuples of them"
    )


def _key(key: Any, name: str) -> int | str:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise ValueError(f"{name} has a {type(key).__name__} for a key, which a checkpoint cannot hold: int or str")
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
    """The texts in the head of a safetensors file."""
    (length,) = struct.unpack_from("<Q", content)
    if length > min(len(content) - 8, _MOST_HEADER_BYTES):
        raise ValueError("a head longer than the file")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    digest.update(f"{len(text)} {text}".encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        _add(digest, tensors[name])
    return digest.hexdigest()


def _add(digest: hashlib._Hash | hashlib.blake2b, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        digest.update(repr(leaf).encode())
        return
    digest.update(f" {leaf.dtype} {tuple(leaf.shape)} ".encode())
    # as bytes: numpy has no bfloat16
    digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _leaves(batch: Any) -> Iterator[Any]:
    """What a batch of nested containers holds, in order."""
    if isinstance(batch, Mapping):
        for name, item in batch.items():
            yield name
            yield from _leaves(item)
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _leaves(item)
    else:
        yield batch
