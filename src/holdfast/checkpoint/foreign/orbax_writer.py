"""Arrays into the store of an Orbax checkpoint that is being made, and back out of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, final

import numpy as np
import xxhash

from holdfast import faults
from holdfast.arrays import Bytes1D
from holdfast.arrays import dtype as dtype_of
from holdfast.arrays.text import reason
from holdfast.checkpoint.foreign.boxes import cut, extent, pieces, whole
from holdfast.checkpoint.foreign.orbax import trim
from holdfast.checkpoint.foreign.orbax_layout import ExportTree, stored_name
from holdfast.checkpoint.step_reader import Box, StepReader
from holdfast.errors import CorruptError, DeadlineError, OutOfSpaceError, StorageError

_WAIT_S: Final = 600.0
"""The longest that one write, read or commit may take."""
_SETTLE_S: Final = 10.0
"""How long an interrupted export waits for what is under way."""
_CHUNK: Final = 64 << 20
"""Bytes of a chunk at most: what a reader of a part of an array has to decode."""

Progress = Callable[[int], None]


@final
class OrbaxWriter:
    """Arrays into the store of an unfinished checkpoint, and back out of it."""

    def __init__(self, library: ModuleType, folder: str, reader: StepReader, budget: int) -> None:
        self._library = library
        self._folder = folder
        self._reader = reader
        self._budget = budget
        self._kvstore = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": os.path.join(folder, "")},
            "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000},
        }
        self._seen: dict[str, str] = {}

    def write(self, tree: ExportTree, progress: Progress) -> int:
        """Write every array and scalar, chunk by chunk; the bytes written."""
        done = 0
        pending: list[Any] = []
        transaction, held = self._library.Transaction(), 0
        ordered = sorted(tree.arrays, key=lambda one: self._reader.first_byte(one[1]))
        for name, value in tree.scalars.items():
            if value is not None and not isinstance(value, str):
                array = np.asarray(value)
                held += self._put(self._opened(name, array.dtype, (), (), transaction), (), array, pending)
        for name, entry in ordered:
            kind = dtype_of(entry.dtype)
            chunk = cut(entry.shape, (1,) * len(entry.shape), kind.itemsize, min(_CHUNK, self._budget))
            tensor = self._opened(name, kind.numpy, entry.shape, chunk, transaction)
            hasher = xxhash.xxh3_128()
            for box in pieces(whole(entry.shape), chunk):
                data = self._reader.read(entry, box)
                hasher.update(data.data)
                values = data.view(kind.numpy).reshape(extent(box))
                held += self._put(tensor, box, values, pending)
                done += data.size
                progress(done)
                if held >= self._budget:
                    # A commit writes the data and a new version of the tree: many small arrays share one.
                    self._commit(pending, transaction)
                    transaction, held = self._library.Transaction(), 0
                    tensor = self._reopened(name, transaction)
            self._seen[name] = hasher.hexdigest()
        self._commit(pending, transaction)
        return done

    def _put(self, tensor: Any, box: Box, values: Any, pending: list[Any]) -> int:
        part = tensor[tuple(slice(lo, hi) for lo, hi in box)] if box else tensor
        pending.append(part.write(values))
        return int(values.nbytes)

    def _commit(self, pending: list[Any], transaction: Any) -> None:
        for future in pending:
            self._done("write", future.copy)
        self._done("commit", transaction.commit_async())
        pending.clear()
        trim()
        faults.site("export.committed")

    def check(self, tree: ExportTree, progress: Progress) -> dict[str, str]:
        """The digests of all arrays, after reading them back. Fails: CorruptError where one differs."""
        done = 0
        for name, entry in tree.arrays:
            tensor = self._reopened(name, None)
            kind = dtype_of(entry.dtype)
            found = (tensor.dtype.numpy_dtype, tuple(tensor.shape))
            if found != (kind.numpy, entry.shape):
                raise CorruptError(f"{name}: written as {entry.dtype}{list(entry.shape)}, read as {found}")
            hasher = xxhash.xxh3_128()
            for box in pieces(whole(entry.shape), tensor.chunk_layout.write_chunk.shape or ()):
                part = tensor[tuple(slice(lo, hi) for lo, hi in box)] if box else tensor
                values = np.ascontiguousarray(self._done("read", part.read(order="C")))
                data: Bytes1D = values.reshape(-1).view(np.uint8)
                hasher.update(data.data)
                done += data.size
                progress(done)
                trim()
            if hasher.hexdigest() != self._seen[name]:
                raise CorruptError(
                    f"{name}: written as {self._seen[name]}, read back as {hasher.hexdigest()}",
                    hint="memory or storage of this machine is at fault; nothing was exported",
                    arrays=[name],
                )
        return self._seen

    def _opened(
        self, name: str, kind: np.dtype[Any], shape: Sequence[int], chunk: Sequence[int], transaction: Any
    ) -> Any:
        spec = {
            **self._spec(name),
            "metadata": {
                "shape": list(shape),
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "zstd", "configuration": {"level": 1}},
                ],
            },
        }
        opening = self._library.open(
            spec, dtype=self._library.dtype(kind), create=True, transaction=transaction
        )
        return self._done("create", opening)

    def _reopened(self, name: str, transaction: Any) -> Any:
        return self._done("open", self._library.open(self._spec(name), open=True, transaction=transaction))

    def _spec(self, name: str) -> dict[str, Any]:
        return {
            "driver": "zarr3",
            "kvstore": {**self._kvstore, "path": f"{stored_name(name)}/"},
            # A chunk of zeros is written like any other: one that is not there is a loss.
            "store_data_equal_to_fill_value": True,
        }

    def _done(self, what: str, future: Any) -> Any:
        try:
            return future.result(timeout=_WAIT_S)
        except TimeoutError:
            raise DeadlineError(f"to {what} in {self._folder} took longer than {_WAIT_S:.0f} s") from None
        # The library raises these for whatever the file system refuses.
        except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
            if os.strerror(errno.ENOSPC) in str(error):
                raise OutOfSpaceError(
                    f"cannot {what} in {self._folder}: no space is left there",
                    path=self._folder,
                    errno_=errno.ENOSPC,
                    hint="free space or give another place; nothing is left of what was written",
                ) from error
            raise StorageError(
                f"cannot {what} in {self._folder}: {reason(error)}",
                path=self._folder,
                hint="nothing is left of what was written; mend that, or give another place",
            ) from error
        except KeyboardInterrupt:
            # The library's threads go on writing, into the folder that is about to be removed.
            with suppress(Exception):
                future.result(timeout=_SETTLE_S)
            raise
