"""Unfinished multipart uploads on S3: found and given up.

obstore gives up an upload that fails, but has no call to find one whose process was killed. S3 keeps, and
bills, its pieces until they are given up. The two requests for that are signed here (AWS Signature Version
4), with credentials that are given as such: in `StoreOptions.config`, the environment, or by boto3 where it
is installed. Elsewhere a lifecycle rule of the bucket has to do it.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import logging
import os
import re
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Final, NamedTuple, final
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from holdfast.errors import StorageError
from holdfast.storage.bucket import Bucket

log = logging.getLogger("holdfast.storage")

_EMPTY: Final = hashlib.sha256(b"").hexdigest()
_MAX_ANSWER: Final = 16 << 20
_SPACE: Final = re.compile(r"^\{[^}]*\}")


class Credentials(NamedTuple):
    """What a request is signed with."""

    key_id: str
    secret: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.key_id})"


class Unfinished(NamedTuple):
    """One upload: its key below the bucket's root, and its id."""

    key: str
    id: str


def signed(
    method: str,
    host: str,
    path: str,
    query: Mapping[str, str],
    credentials: Credentials,
    *,
    region: str,
    now: datetime,
) -> tuple[str, dict[str, str]]:
    """The target and headers of a request without a body, signed. `path` is not quoted yet."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
    if credentials.token is not None:
        headers["x-amz-security-token"] = credentials.token
    quoted = quote(path, safe="/-_.~")
    asked = "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = f"{method}\n{quoted}\n{asked}\n{lines}\n{names}\n{_EMPTY}"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = b"AWS4" + credentials.secret.encode()
    for word in (stamp[:8], region, "s3", "aws4_request", text):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{scope}, SignedHeaders={names}, "
        f"Signature={key.hex()}"
    )
    return f"{quoted}?{asked}", headers


@final
class Uploads:
    """The unfinished uploads of one S3 bucket. Every method fails with StorageError."""

    def __init__(self, bucket: Bucket, credentials: Credentials) -> None:
        self._bucket = bucket
        self._credentials = credentials
        config = _config(bucket)
        self._name = config["bucket"]
        self._region = config.get("region") or config.get("default_region") or "us-east-1"
        address = config.get("endpoint") or config.get("endpoint_url")
        self._url = urlsplit(address or f"https://s3.{self._region}.amazonaws.com")

    def below(self, prefix: str) -> list[Unfinished]:
        """Those whose key begins with `prefix`."""
        found: list[Unfinished] = []
        query = {"uploads": "", "prefix": prefix}
        seen: set[tuple[str, str]] = set()
        while True:
            try:
                answer = ElementTree.fromstring(self._ask("GET", "", query, 200))
            except ElementTree.ParseError as error:
                raise StorageError(
                    f"{self._bucket.url}: unfinished uploads cannot be listed: the answer is no XML: {error}",
                    path=self._bucket.url,
                    hint="is the endpoint that of an S3 store? a lifecycle rule can abort incomplete uploads",
                ) from error
            said = {_tag(child): child.text or "" for child in answer}
            for child in answer:
                fields = {_tag(field): field.text or "" for field in child}
                if _tag(child) == "Upload" and fields.keys() >= {"Key", "UploadId"}:
                    found.append(Unfinished(fields["Key"], fields["UploadId"]))
            marker = (said.get("NextKeyMarker", ""), said.get("NextUploadIdMarker", ""))
            # A store that says the same again would be asked for ever.
            if said.get("IsTruncated") != "true" or not marker[0] or marker in seen:
                return found
            seen.add(marker)
            query["key-marker"], query["upload-id-marker"] = marker

    def give_up(self, upload: Unfinished) -> None:
        """Free the pieces of an upload; nothing happens if it is gone."""
        self._ask("DELETE", upload.key, {"uploadId": upload.id}, 204)

    def _ask(self, method: str, key: str, query: Mapping[str, str], wanted: int) -> bytes:
        base = f"{self._url.path.rstrip('/')}/{self._name}"
        path = f"{base}/{key}" if key else base
        target, headers = signed(
            method,
            self._url.netloc,
            path,
            query,
            self._credentials,
            region=self._region,
            now=datetime.now(UTC),
        )
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        timeout_s = self._bucket.options.timeout_s
        try:
            with closing(kind(self._url.hostname or "", self._url.port, timeout=timeout_s)) as connection:
                connection.request(method, target, headers=headers)
                answer = connection.getresponse()
                data = answer.read(_MAX_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(
                f"{self._bucket.url}: unfinished uploads cannot be listed: {error}", path=self._bucket.url
            ) from error
        if answer.status not in (wanted, 404):
            raise StorageError(
                f"{self._bucket.url}: unfinished uploads cannot be listed or given up: the store answered "
                f"{answer.status} {answer.reason}",
                path=self._bucket.url,
                hint="allow s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or let a lifecycle "
                "rule of the bucket abort incomplete uploads",
            )
        return data if answer.status == wanted else b"<none/>"


def credentials_of(bucket: Bucket) -> Credentials | None:
    """Those that requests are signed with, if they can be had; None elsewhere, and for anonymous access."""
    config = _config(bucket)
    if config.get("skip_signature", "").lower() in ("1", "true"):
        return None
    key_id, secret = config.get("access_key_id"), config.get("secret_access_key")
    if key_id and secret:
        return Credentials(key_id, secret, config.get("session_token") or config.get("token"))
    try:
        import boto3
    except ImportError:
        return None
    try:
        found = boto3.Session().get_credentials()
        frozen = found.get_frozen_credentials() if found is not None else None
    # A profile that is not there, a token that cannot be renewed: boto3 has many, and this is only cleaning.
    except Exception as error:
        log.warning("boto3 has no credentials for %s: %s", bucket.url, error)
        return None
    return None if frozen is None else Credentials(frozen.access_key, frozen.secret_key, frozen.token)


def _config(bucket: Bucket) -> dict[str, str]:
    """The settings of an S3 store, as obstore finds them: the given ones, then the environment's."""
    found = {
        name.removeprefix("AWS_").lower(): value
        for name, value in os.environ.items()
        if name.startswith("AWS_") and value
    }
    client: object = bucket.client
    given: Mapping[str, object] = getattr(client, "config", {})
    return found | {name.removeprefix("aws_"): str(value) for name, value in given.items()}


def _tag(element: ElementTree.Element) -> str:
    return _SPACE.sub("", element.tag)
