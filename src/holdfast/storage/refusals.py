"""What an object store's refusal means: for good or in passing, and what to do about it.

obstore raises few types and puts the server's answer into the text: the status and the store's own error
code are taken from there. Whatever cannot be told is taken as passing, and tried again until the deadline.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from holdfast.errors import AccessError, MissingPathError, StorageError

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,300})</Message>")
_PASSING: Final = frozenset({408, 409, 425, 429})
"""Client errors that are about the moment, not about the request."""
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_METADATA: Final = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_CREDENTIALS: Final = (
    "check the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT or "
    "AZURE_STORAGE_ACCOUNT_KEY in the environment, or a role that may read, write, list and delete here"
)


class Refusal(NamedTuple):
    """`error` to raise, and whether trying again may help."""

    error: StorageError
    passing: bool


def refusal(error: Exception, *, doing: str, path: str, endpoint: str = "") -> Refusal:
    """What an exception of obstore means, met while `doing` something to `path` at the `endpoint` given."""
    text = str(error).partition("\n\nDebug source")[0]
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    reason = f"cannot {doing} {path}: {_reason(text, status)}"
    if any(sign in text for sign in _NO_BUCKET):
        hint = "create the bucket first, or check its name, region and endpoint"
        return Refusal(MissingPathError(reason, path=path, hint=hint), False)
    if isinstance(error, FileNotFoundError) or status == 404:
        return Refusal(MissingPathError(reason, path=path, hint="check the path"), False)
    kind = type(error).__name__
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return Refusal(AccessError(reason, path=path, hint=_CREDENTIALS), False)
    if any(host in text for host in _METADATA):
        text = f"cannot {doing} {path}: there are no credentials for it"
        return Refusal(AccessError(text, path=path, hint=_CREDENTIALS), False)
    if kind in ("NotSupportedError", "InvalidPathError") or _is_final(status):
        hint = "the store refuses this request for good: check name, region and endpoint of the bucket"
        if "KeyTooLong" in text or status == 414:
            hint = "object stores take names of about 1,000 bytes: give a shorter prefix"
        return Refusal(StorageError(reason, path=path, hint=hint), False)
    hint = "the store or the network is in trouble; earlier steps are untouched"
    if status is None:
        hint = f"{hint}; is the endpoint right and reachable?{f' ({endpoint})' if endpoint else ''}"
    return Refusal(StorageError(reason, path=path, hint=hint), True)


def _is_final(status: int | None) -> bool:
    return status is not None and 400 <= status < 500 and status not in _PASSING


def _reason(text: str, status: int | None) -> str:
    """The store's own words, without addresses and signatures."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is not None:
        said = f"{code[1]}: {message[1]}" if message is not None else code[1]
        return f"{said} ({status})" if status is not None else said
    if status is not None:
        answer = text.partition("status code: ")[2].splitlines()[0]
        return f"the store answered {answer[:200].rstrip(': ')}"
    return text.rpartition(" - ")[2].splitlines()[0][:300]
