"""Just enough of AWS Signature Version 4 to put one object, without an S3 client.

The fixture has to know that a server takes data before any client of ours is involved, and the test kit may
not lean on the storage SDK that it helps to test.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import time

__all__ = ["put_object"]

TIMEOUT_S = 10.0


def put_object(host: str, path: str, body: bytes, *, access_key: str, secret_key: str, region: str) -> int:
    """PUT `body` and return the status. `path` begins with the bucket and holds only unreserved letters."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": moment}
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"PUT\n/{path}\n\n{lines}\n{names}\n{digest}"
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    try:
        connection.request("PUT", f"/{path}", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()
