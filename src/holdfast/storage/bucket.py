"""Requests to one object store, tried again while they may yet succeed.

obstore retries by itself, with exponential backoff and jitter: answers of 5xx, connections refused, reset or
closed before an answer, and timeouts of requests that may be repeated (reads, parts of an upload). It does
not retry a conditional put that timed out, since it may have happened, nor bytes that end too early. Both are
done here: a conditional put carries a mark of its own, so that after a doubtful answer a look at the name
tells whose bytes lie there. All of it ends `retry_s` after the first try.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, final

from holdfast.clock import Deadline
from holdfast.errors import MissingPathError, StorageError, UsageError
from holdfast.storage.refusals import Refusal, refusal
from holdfast.storage.store import StoreOptions, Version

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

T = TypeVar("T")

CHUNK: Final = 8 << 20
"""Bytes of one piece of an upload, unless a part is so large that it would take too many."""
_MOST_PIECES: Final = 9_000  # S3 and GCS allow 10,000
_AT_ONCE: Final = 8
_MARK: Final = "holdfastmark"  # Azure takes identifiers only, S3 lower case
_BACKOFF_S: Final = (0.1, 5.0)
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Where obstore looks for the address of an S3 store, the first before all others."""
_ADDRESS: Final = re.compile(r"https?://[!-~]+", re.IGNORECASE)
_ENDPOINT_SETTINGS: Final = frozenset({"endpoint", "endpoint_url", *(name.lower() for name in _ENDPOINTS)})

_memory_lock = threading.Lock()
_memory: dict[str, Client] = {}
"""The stores in this process, by the name after memory://."""


class Listing(NamedTuple):
    """What lies directly below a prefix."""

    folders: list[str]
    files: list[str]


@dataclass(frozen=True, slots=True)
class Object:
    """A small object, whole."""

    data: bytes
    modified: float
    version: Version


@final
class Bucket:
    """One object store, below one prefix. Keys are relative to it; safe to share between threads."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        try:
            import obstore
        except ImportError:
            raise UsageError(
                f"{url} is on an object store, and obstore is not installed",
                hint="pip install 'holdfast[objects]'",
            ) from None
        self.url = url
        self.options = options
        self._ob = obstore
        self._endpoints = _endpoints(url, options)
        self.client = _client(url, options, self._endpoints.values())
        self._keeps = url.startswith("memory://")
        """Whether the store goes on to use the very memory that it was given."""

    def label(self, key: str) -> str:
        """The full name of a key, for messages."""
        return f"{self.url}/{key}" if key else self.url

    # ---- looking

    def listing(self, key: str) -> Listing:
        """The folders and objects directly below a key."""

        def ask() -> Listing:
            found = self._ob.list_with_delimiter(self.client, key or None)
            cut = len(key) + 1 if key else 0
            folders = [prefix[cut:].strip("/") for prefix in found["common_prefixes"]]
            return Listing(folders, [meta["path"][cut:] for meta in found["objects"]])

        return self._again("list", key, ask)

    def walk(self, key: str) -> list[str]:
        """The names of all objects below a key, relative to it."""

        def ask() -> list[str]:
            cut = len(key) + 1 if key else 0
            pages = self._ob.list(self.client, key or None, chunk_size=1000)
            return [meta["path"][cut:] for page in pages for meta in page]

        return self._again("list", key, ask)

    def head(self, key: str) -> tuple[int, float, Version] | None:
        """Size, time of writing and version of an object; None if there is none."""

        def ask() -> tuple[int, float, Version] | None:
            try:
                meta = self._ob.head(self.client, key)
            except FileNotFoundError:
                return None
            version = Version(meta["e_tag"], meta["version"])
            return meta["size"], meta["last_modified"].timestamp(), version

        return self._again("look at", key, ask)

    def get(self, key: str, *, max_bytes: int) -> Object:
        """A whole object, unless it is too large. Fails: MissingPathError."""

        def ask() -> Object:
            found = self._ob.get(self.client, key)
            meta = found.meta
            if meta["size"] > max_bytes:
                raise StorageError(
                    f"{self.label(key)} has {meta['size']:,} bytes, more than the {max_bytes:,} allowed here",
                    path=self.label(key),
                )
            data = bytes(found.bytes())
            _check_length(len(data), meta["size"])
            return Object(data, meta["last_modified"].timestamp(), Version(meta["e_tag"], meta["version"]))

        return self._again("read", key, ask)

    def fetch(self, key: str, begin: int, end: int) -> memoryview:
        """Exactly the bytes [begin, end) of an object."""

        def ask() -> memoryview:
            data = memoryview(self._ob.get_range(self.client, key, start=begin, end=end))
            _check_length(data.nbytes, end - begin)
            return data

        return self._again("read", key, ask)

    # ---- writing

    def put(self, key: str, data: Any) -> None:
        """Put bytes, whatever lies there: a buffer, or a list of them."""
        if self._keeps and isinstance(data, list):
            data = b"".join(data)
        self._again("write", key, lambda: self._ob.put(self.client, key, data, use_multipart=False))

    def stream(self, key: str, pieces: Iterator[memoryview], size: int) -> None:
        """Put `size` bytes piece by piece, several at a time, as they come; not tried again as a whole.

        Nothing of it is visible before all of it is there. An error from `pieces` gives the upload up.
        """
        chunk = CHUNK * -(-size // (CHUNK * _MOST_PIECES))
        sent: Any = (bytes(piece) for piece in pieces) if self._keeps else pieces
        try:
            self._ob.put(
                self.client, key, sent, use_multipart=True, chunk_size=chunk, max_concurrency=_AT_ONCE
            )
        except StorageError:
            raise
        except Exception as error:
            raise self._refusal(error, "write", key).error from error

    def create(self, key: str, data: bytes) -> bool:
        """Put bytes if nothing lies there; False if something does."""
        return self._conditionally(key, data, "create", "AlreadyExistsError")

    def update(self, key: str, data: bytes, expected: Version) -> bool:
        """Put bytes if exactly that version lies there; False if it does not."""
        found = {"e_tag": expected.e_tag, "version": expected.number}
        mode = {name: value for name, value in found.items() if value is not None}
        return self._conditionally(key, data, mode, "PreconditionError")

    def _conditionally(self, key: str, data: bytes, mode: Any, refused: str) -> bool:
        mark = uuid.uuid4().hex

        def ask() -> bool:
            doubt: Exception | None = None
            try:
                self._ob.put(self.client, key, data, mode=mode, attributes={_MARK: mark})
                return True
            except FileNotFoundError as error:
                missing = self._refusal(error, "write", key).error
                if mode == "create" or "bucket" in (missing.hint or ""):
                    raise
                return False  # there is nothing to update
            except Exception as error:
                if type(error).__name__ != refused:
                    if not self._refusal(error, "write", key).passing:
                        raise
                    doubt = error
            # obstore repeats a put that was answered with 500: the refusal may be about our own bytes.
            found = self._mark_at(key)
            if found is None and mode != "create":
                return False
            if found is None or (doubt is not None and found != mark and mode != "create"):
                raise doubt or OSError("the name is taken and free at once")
            return found == mark

        return self._again("write", key, ask)

    def _mark_at(self, key: str) -> str | None:
        """The mark of the put that made the object there; empty for one without, None for no object."""
        try:
            found = self._ob.get(self.client, key, options={"head": True})
        except FileNotFoundError:
            return None
        return str(found.attributes.get(_MARK, ""))

    def delete(self, keys: Sequence[str]) -> bool:
        """Remove objects; False if the store says that one of them was not there, which not all do."""

        def ask() -> bool:
            try:
                self._ob.delete(self.client, keys[0] if len(keys) == 1 else list(keys))
            except FileNotFoundError as error:
                if "bucket" in (self._refusal(error, "remove", "").error.hint or ""):
                    raise
                return False
            return True

        return self._again("remove", keys[0], ask) if keys else False

    # ---- trying again

    def _refusal(self, error: Exception, doing: str, key: str) -> Refusal:
        where = " and ".join(f"{name} = {address}" for name, address in self._endpoints.items())
        return refusal(error, doing=doing, path=self.label(key), endpoint=where)

    def _again(self, doing: str, key: str, ask: Callable[[], T]) -> T:
        deadline, tries = Deadline(self.options.retry_s), 0
        while True:
            try:
                return ask()
            except (StorageError, MissingPathError):
                raise
            except Exception as error:
                found = self._refusal(error, doing, key)
                if not found.passing or deadline.expired():
                    raise found.error from error
            first, most = _BACKOFF_S
            # Full jitter: many ranks that were refused together must not come back together.
            time.sleep(min(random.uniform(0, min(most, first * 2**tries)), deadline.remaining()))
            tries += 1


def _check_length(got: int, wanted: int) -> None:
    if got != wanted:
        raise OSError(f"{got:,} of {wanted:,} bytes came")


def _client(url: str, options: StoreOptions, endpoints: Iterable[str]) -> Client:
    from obstore.store import MemoryStore, from_url

    if url.startswith("memory://"):
        with _memory_lock:
            return _memory.setdefault(url, MemoryStore())
    config: dict[str, str] = dict(options.config)
    if options.endpoint is not None:
        config["base_url" if url.startswith("gs://") else "endpoint"] = options.endpoint
    client: ClientConfig = {
        "timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=options.connect_s),
        "allow_http": _is_plain(endpoints),
    }
    retry: RetryConfig = {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=options.retry_s),
        "backoff": {
            "init_backoff": timedelta(seconds=_BACKOFF_S[0]),
            "max_backoff": timedelta(seconds=_BACKOFF_S[1]),
            "base": 2,
        },
    }
    made: Any = from_url
    try:
        found: Client = made(url, config=config, client_options=client, retry_config=retry)
    except Exception as error:
        text = str(error).partition("\n\nDebug source")[0]
        raise UsageError(
            f"{url} cannot be opened: {text}",
            hint="write s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        ) from error
    return found


def _endpoints(url: str, options: StoreOptions) -> dict[str, str]:
    """The addresses that were given for the store, by who gave them. Fails: UsageError for one that is none.

    obstore panics at some of those, and takes others for a network in trouble.
    """
    named = {} if options.endpoint is None else {"endpoint": options.endpoint}
    named |= {name: text for name, text in options.config.items() if name.lower() in _ENDPOINT_SETTINGS}
    around = _ENDPOINTS[:1] if named else _ENDPOINTS
    given = {name: os.environ[name] for name in around if name in os.environ and url.startswith("s3")}
    for name, text in (named | given).items():
        if _ADDRESS.fullmatch(text) is None:
            raise UsageError(
                f"{name} is {text!r}, which is no address of a store",
                hint="write http://HOST:PORT or https://HOST, or leave it out for the cloud's own",
            )
    first = given.get(_ENDPOINTS[0])
    if first is not None and any(text != first for text in named.values()):
        # obstore has no setting that overrules this variable: a run must not write where it was not sent.
        raise UsageError(
            f"{_ENDPOINTS[0]} is {first}, and another endpoint was given too: {', '.join(named.values())}",
            hint=f"unset {_ENDPOINTS[0]}, which obstore puts before everything else, or make them equal",
        )
    return named | given


def _is_plain(endpoints: Iterable[str]) -> bool:
    """Whether the store was asked to be reached without TLS, by whoever gave its address."""
    allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    return allowed or any(address.lower().startswith("http://") for address in endpoints)
