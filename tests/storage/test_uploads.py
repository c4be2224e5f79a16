"""Signing requests to S3: to the letter what AWS's own library signs."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote, urlencode

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from holdfast.storage.uploads import Credentials, signed


@pytest.mark.parametrize("token", [None, "a token"])
@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("GET", "/bucket", {"uploads": "", "prefix": "runs/a b+c/é~_-."}),
        ("DELETE", "/bucket/runs/step-00000001/part-00000.a-1.safetensors", {"uploadId": "A+/= z"}),
    ],
)
def test_signatures_are_those_of_botocore(
    method: str, path: str, query: dict[str, str], token: str | None
) -> None:
    mine = Credentials("AKID", "secret/key", token)
    assert "secret" not in repr(mine)
    request = AWSRequest(method, f"http://127.0.0.1:9000{path}?{urlencode(query, quote_via=quote)}")
    auth = S3SigV4Auth(BotoCredentials("AKID", "secret/key", token), "s3", "eu-west-1")
    # The library takes the time from its own clock: sign with what it took.
    auth.add_auth(request)
    theirs = request.headers
    at = datetime.strptime(theirs["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    target, headers = signed(method, "127.0.0.1:9000", path, query, mine, region="eu-west-1", now=at)
    signature = theirs["Authorization"].rpartition("Signature=")[2]
    assert headers["authorization"].rpartition("Signature=")[2] == signature
    assert target.startswith(path)
