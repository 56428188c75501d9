"""The identity of a model: a hash of all that it computes with, made from the content of its file.

Metadata that change no logits (names, templates, tokens) do not count, and neither does the order
of the tensors. Snapshots and stores know a model by this hash, so a wrong one would restore what
another model computed.

Hashing reads the whole file, so the hash is kept in the user's cache folder
(:mod:`kvcellar.runtime.hash_cache`); nothing is written beside a model, and nothing that lies there
is believed. A kept hash is used only if both agree:

1. The stamp of the open file: device, inode, size, time of modification, and time of change, which
   no program can set. Copies, archives and downloads keep sizes and times of modification, but get
   an inode and a time of change of their own.
2. A digest of samples: the metadata that count, the list of tensors, and of every tensor
   :data:`N_SAMPLES` pieces of :data:`SAMPLE_BYTES` bytes, or all of it if that is less.

Where samples are taken is derived from a random secret of each entry, which only the user can read.
So a file with a stamp that was seen before (a file system that uses inodes again after the clock
was set back, another disk under the number of the first, a server whose clock or inodes mean
nothing, a disk that somebody prepared) has to be equal in places that its maker cannot know.
Another fine-tune differs nearly everywhere and is found. A file that differs in a share p of one
tensor alone passes with a chance of ``(1 - p) ** N_SAMPLES``: somebody who can forge the whole
stamp, which takes the administrator or the disk, can change a few values unnoticed, and nothing
more. On Windows, where the time of change is that of creation, the second check is the stronger.

A file whose content is replaced in place while its model is open is not detected: replace files by
renaming, which leaves those that are open as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvcellar.backends.base import ModelFile
from kvcellar.files import FileStamp
from kvcellar.runtime.hash_cache import HashCache, KeptHash

N_SAMPLES = 8
SAMPLE_BYTES = 256
SETTLED_NS = 2_000_000_000
"""A hash is kept if the file was last changed at least that long before it was made.

A later change within one tick of the file system's clock would leave the stamp as it is; the
coarsest ticks are of two seconds.
"""


def weights_hash(file: ModelFile[Any]) -> str:
    """Return the hash of an open file, 64 hexadecimal digits.

    If another file is at its path by now, or the file was changed, what is kept is not about it.
    """
    stamp = file.stamp
    if FileStamp.at(file.path) != stamp:
        return compute_hash(file)
    cache = HashCache.of_user()
    kept = cache.get(stamp)
    if kept is not None and sample_digest(file, kept.secret) == kept.samples:
        return kept.weights
    made = compute_hash(file)
    if _settled(stamp) and FileStamp.at(file.path) == stamp:
        secret = secrets.token_bytes(32)
        cache.put(stamp, KeptHash(made, secret, sample_digest(file, secret)))
    return made


def compute_hash(file: ModelFile[Any]) -> str:
    """Compute the hash; reads the whole file."""
    whole = hashlib.sha256()
    for line in _settings(file):
        whole.update(line)
    for tensor in file.tensors():
        whole.update(_heading(tensor.name, tensor.type_name, tensor.shape, tensor.data.nbytes))
        whole.update(tensor.data.data)
    return whole.hexdigest()


def sample_digest(file: ModelFile[Any], secret: bytes) -> str:
    """Return a digest of the file's headings and of samples at places that the secret decides."""
    digest = hashlib.blake2b(key=secret, digest_size=32)
    for line in _settings(file):
        digest.update(line)
    within = np.arange(SAMPLE_BYTES)
    for name, type_name, shape, data in file.tensors():
        heading = _heading(name, type_name, shape, data.nbytes)
        digest.update(heading)
        if data.nbytes <= N_SAMPLES * SAMPLE_BYTES:
            digest.update(data.data)
            continue
        # SHAKE gives as many random bytes as are asked for; remainders of 64 bits are all but even.
        random = hashlib.shake_256(secret + heading).digest(8 * N_SAMPLES)
        places = np.frombuffer(random, "<u8") % np.uint64(data.nbytes - SAMPLE_BYTES + 1)
        digest.update(data[places.astype(np.int64)[:, np.newaxis] + within].tobytes())
    return digest.hexdigest()


def _settings(file: ModelFile[Any]) -> Iterator[bytes]:
    """Yield the metadata that count, a line each."""
    architecture = str(file.metadata.get("general.architecture", ""))
    for key in sorted(file.metadata):
        if key == "general.architecture" or key.startswith(f"{architecture}."):
            value = json.dumps(file.metadata[key], sort_keys=True, default=np.ndarray.tolist)
            yield f"{_one_line(key)}={value}\n".encode()


def _heading(name: str, type_name: str, shape: tuple[int, ...], n_bytes: int) -> bytes:
    return f"{_one_line(name)}:{type_name}:{list(shape)}:{n_bytes}\n".encode()


def _one_line(name: str) -> str:
    """Return a name so that it cannot be taken for several lines; common names are unchanged."""
    return json.dumps(name)[1:-1]


def _settled(stamp: FileStamp) -> bool:
    changed = stamp.ctime_ns if os.name == "posix" else stamp.mtime_ns
    return time.time_ns() - changed >= SETTLED_NS
