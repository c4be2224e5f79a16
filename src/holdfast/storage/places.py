"""From the name of a place to the store there."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from holdfast.errors import UsageError
from holdfast.storage.files import Files
from holdfast.storage.local import LocalStore
from holdfast.storage.store import SCHEMES, Store, StoreOptions, is_url


def opened(
    place: str | os.PathLike[str], options: StoreOptions | None = None, *, files: Files | None = None
) -> Store:
    """The store at a path, a `file://` URL, or an object store's (`s3://`, `gs://`, `az://`).

    Nothing is created and nothing is asked of the store. `memory://name` is a store in this process alone.
    `files` are those of a folder. Fails: UsageError for a URL of another kind, or without obstore; for a name
    that no message could carry.
    """
    _check(os.fspath(place))
    if not is_url(place):
        return LocalStore(local_path(os.fspath(place)), files=files)
    text = os.fspath(place)
    if text.partition("://")[0] not in SCHEMES:
        raise UsageError(
            f"{text} is no place that Holdfast knows",
            hint="use a path, file://, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        )
    from holdfast.storage.objects import ObjectStore  # obstore is paid for by those who use it

    return ObjectStore(text, options or StoreOptions())


def local_path(text: str) -> str:
    """The path that `text` is, also as `file://`. Fails: UsageError for one of another machine."""
    if not text.startswith("file://"):
        return text
    url = urlsplit(text)
    path = unquote(url.path)
    if url.netloc in ("", "localhost") and path and "\0" not in path:
        return path
    what = "names a file on another machine" if path and "\0" not in path else "names no file"
    raise UsageError(f"{text} {what}", hint="write file:///path, or the path itself")


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{text!r} is not UTF-8", hint="rename the folder: vault, journal and manifest have to name it"
        ) from None
    if "\0" in text or not text:
        raise UsageError(f"{text!r} is no place", hint="give a path, or s3://bucket/prefix")
