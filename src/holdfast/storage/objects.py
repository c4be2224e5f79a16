"""Checkpoints on an object store: S3, Google Cloud Storage, Azure, or memory for tests.

There are no folders, no locks and no syncs: an object is there, whole and durable, when its put is answered.
What takes their place: the commit is a put that the store refuses if the name is taken; replacing is one that
it refuses unless the expected version lies there; live writers give signs of life (`beats`). A store that
does not honour conditional puts would let two writers commit the same step: it is refused before the first
save.
"""

from __future__ import annotations

import copy
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Self, final

from holdfast.errors import HoldfastError, StorageError, UnfitStoreError
from holdfast.storage.beats import Beats
from holdfast.storage.bucket import Bucket
from holdfast.storage.store import (
    PROBE,
    Hold,
    PartReader,
    PartWriter,
    Store,
    StoreOptions,
    Upload,
    Version,
    check_names,
)
from holdfast.storage.streams import ObjectPartReader, ObjectPartWriter
from holdfast.storage.uploads import Unfinished, Uploads, credentials_of

log = logging.getLogger("holdfast.storage")

_WORK: Final = ".holdfast"


@final
class ObjectStore(Store):
    """A prefix in a bucket. Its requests end by the deadlines in its options."""

    poll_s = 0.25
    at_once = 16
    has_locks = False

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.root = url.rstrip("/")
        self.options = options
        self.hold_s = options.hold_s
        self._bucket = Bucket(self.root, options)
        self._beats = Beats(self._bucket)
        self._prefix: tuple[str, ...] = ()
        self._fit = threading.Event()

    def path(self, *names: str) -> str:
        check_names(names)
        return "/".join((self.root, *names))

    def below(self, *names: str) -> Self:
        made = copy.copy(self)  # requests, signs of life and the verdict of the probe are shared
        made.root = self.path(*names)
        made._prefix = (*self._prefix, *names)
        return made

    def _key(self, names: Sequence[str]) -> str:
        check_names(names)
        return "/".join((*self._prefix, *names))

    # ---- folders

    def make_root(self) -> None:
        """Refuse a store that is not there or ignores conditions. Fails: UnfitStoreError, StorageError."""
        if self._fit.is_set():
            return
        key = f"{_WORK}/{PROBE}{uuid.uuid4().hex[:12]}"
        if not self._bucket.create(key, b"first"):
            raise self._unfit("it says that a name is taken which nobody ever used")
        try:
            if self._bucket.create(key, b"second"):
                raise self._unfit("it overwrites an object although it was told to create it only if absent")
            found = self._bucket.head(key)
            if found is None:
                raise self._unfit("it does not show an object that was just put there")
            if not self._bucket.update(key, b"third", found[2]):
                raise self._unfit("it does not replace an object although the given version lies there")
            if self._bucket.update(key, b"fourth", found[2]):
                raise self._unfit("it replaces an object although another version lies there (If-Match)")
        finally:
            with suppress(HoldfastError):
                self._bucket.delete([key])
        self._fit.set()

    def _unfit(self, reason: str) -> UnfitStoreError:
        return UnfitStoreError(
            f"{self.root} cannot keep checkpoints: {reason}",
            path=self.root,
            hint="two runs could commit the same step unnoticed; use a store with conditional writes "
            "(Amazon S3, Google Cloud Storage, Azure, MinIO, R2), or a folder",
        )

    def make_folder(self, *names: str) -> None:
        """There are none: a name is made of all its components."""

    def remove_folder(self, *names: str) -> None:
        """It is gone with its last object."""

    def sync_folder(self, *names: str) -> None:
        """A put that was answered is durable."""

    def names(self, *names: str) -> list[str]:
        found = self._bucket.listing(self._key(names))
        return sorted({*found.folders, *found.files})

    def walk(self) -> Iterator[tuple[str, ...]]:
        return (tuple(key.split("/")) for key in self._bucket.walk(self._key(())))

    def exists(self, *names: str) -> bool:
        return self._bucket.head(self._key(names)) is not None

    def having(self, folders: Sequence[str], name: str) -> list[str]:
        if not folders:
            return []
        with ThreadPoolExecutor(min(self.at_once, len(folders)), thread_name_prefix="holdfast-look") as pool:
            there = list(pool.map(lambda folder: self.exists(folder, name), folders))
        return [folder for folder, found in zip(folders, there, strict=True) if found]

    def size(self, *names: str) -> int | None:
        found = self._bucket.head(self._key(names))
        return None if found is None else found[0]

    def is_place(self) -> bool:
        found = self._bucket.listing(self._key(()))
        return bool(found.folders or found.files)

    # ---- small objects

    def read(self, *names: str, max_bytes: int) -> bytes:
        return self._bucket.get(self._key(names), max_bytes=max_bytes).data

    def create(self, *names: str, data: bytes) -> bool:
        return self._bucket.create(self._key(names), data)

    def replace(self, *names: str, data: bytes, expected: Version | None = None) -> bool:
        if expected is not None:
            return self._bucket.update(self._key(names), data, expected)
        self._bucket.put(self._key(names), data)
        return True

    def version(self, *names: str) -> Version | None:
        found = self._bucket.head(self._key(names))
        return None if found is None else found[2]

    def remove(self, *names: str) -> bool:
        return self._bucket.delete([self._key(names)])

    def remove_all(self, folder: str, names: Sequence[str]) -> None:
        keys = [self._key((folder, name)) for name in names]
        for at in range(0, len(keys), 1000):
            self._bucket.delete(keys[at : at + 1000])

    # ---- who is at work

    def hold(self, *names: str, exclusive: bool, holder: str = "") -> Hold | None:
        return self._beats.take(self._key(names), exclusive=exclusive, holder=holder)

    def holder(self, *names: str) -> str:
        return self._beats.holder(self._key(names))

    def is_written(self, *names: str) -> bool:
        """Whether a live process holds this name; of a part, its writer's intent tells."""
        return self._beats.is_alive(self._key(names))

    def is_busy(self, *names: str) -> bool:
        return self.is_written(*names)

    def age_s(self, *names: str) -> float | None:
        found = self._bucket.head(self._key(names))
        return None if found is None else max(0.0, self._beats.now(self._key((_WORK, "x"))) - found[1])

    # ---- parts

    def write_part(self, *names: str, size: int, recycled: Sequence[str] | None = None) -> PartWriter:
        if recycled is not None:
            raise StorageError(f"{self.root}: an object cannot be overwritten in place", path=self.root)
        return ObjectPartWriter(self._bucket, self._key(names), size)

    def open_part(self, *names: str, direct: bool = True, ahead: bool = True) -> PartReader:
        return ObjectPartReader(self._bucket, self._key(names), ahead=ahead)

    def uploads(self) -> list[Upload]:
        """Unfinished multipart uploads, on S3 with credentials that can be had; none elsewhere.

        Google's need a lifecycle rule as well; Azure forgets unfinished blocks by itself after a week.
        """
        if not self.root.startswith("s3"):
            return []
        credentials = credentials_of(self._bucket)
        if credentials is None:
            log.info("%s: unfinished uploads are left to a lifecycle rule of the bucket", self.root)
            return []
        top = [str(getattr(self._bucket.client, "prefix", None) or "").strip("/"), *self._prefix]
        prefix = "".join(f"{part}/" for part in top if part)
        found = Uploads(self._bucket, credentials).below(prefix)
        return [
            Upload(tuple(one.key.removeprefix(prefix).split("/")), f"{one.key}\n{one.id}") for one in found
        ]

    def drop_upload(self, upload: Upload) -> None:
        credentials = credentials_of(self._bucket)
        if credentials is not None:
            key, _, number = upload.key.partition("\n")
            Uploads(self._bucket, credentials).give_up(Unfinished(key, number))
