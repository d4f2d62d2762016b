"""What an obstore error says, and what to tell instead.

obstore raises a handful of types and puts the rest into a text of many lines: the status, the server's
error code, whether a connection ever stood. The outcome of a write hangs on exactly these, so they are read
out of the text. Where the text does not tell, the answer is the careful one: the request may have taken
effect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from forebay.errors import (
    AccessDenied,
    ForebayError,
    NotDone,
    NotFound,
    StorageFull,
    Unavailable,
    Unsupported,
)
from forebay.storage._api import BucketMissing

__all__ = ["CLIENT_ERRORS", "Answered", "Failure", "NotThisWay", "Refused", "UploadFailed"]


class Answered(Exception):
    """Another answer than 2xx to a request that we sent ourselves."""


class Refused(Answered):
    """Of these the one that says: the condition does not hold."""


class NotThisWay(Answered):
    """We cannot send it ourselves, or are answered as the client may not be: let that try."""


class UploadFailed(Exception):
    """A request that we sent ourselves failed; what is known of it, in the words used for the client's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


CLIENT_ERRORS = (BaseError, OSError, ValueError, NotImplementedError, UploadFailed)
"""Everything that obstore and our own uploads raise."""

_STATUS = re.compile(r"non-2xx status code: (\d{3})|status: (\d{3}),")
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_MISSING_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_RETRYABLE_4XX = frozenset({408, 425, 429})
_METADATA_SERVICES = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_CREDENTIALS_HINT = "check the credentials in the environment and the rights they give on the bucket"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request, read."""

    error: Exception
    status: int | None
    """HTTP status of the answer, or None where there was none."""
    code: str
    """The server's own word for it."""
    never_sent: bool
    """No connection stood, or no credentials were found: the server never saw the request."""
    no_credentials: bool
    wrong_region: bool
    """AWS redirects without saying where to: the bucket lies in another region."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Read what obstore raised."""
        if isinstance(error, UploadFailed):
            return error.failure
        text = str(error)
        status = _STATUS.search(text)
        no_credentials = any(f"http://{host}/" in text for host in _METADATA_SERVICES)
        return cls(
            error,
            int(status[1] or status[2]) if status else None,
            cls.code_in(text),
            no_credentials or "kind: Connect," in text,
            no_credentials,
            "incorrectly configured region" in text,
        )

    @classmethod
    def answered(cls, error: Answered, status: int | None = None, code: str = "") -> Failure:
        """An answer to a request of our own."""
        return cls(error, status, code, never_sent=False, no_credentials=False, wrong_region=False)

    @classmethod
    def unanswered(cls, error: Exception, *, never_sent: bool) -> Failure:
        """A request of our own without an answer."""
        return cls(error, None, "", never_sent=never_sent, no_credentials=False, wrong_region=False)

    @staticmethod
    def code_in(text: str) -> str:
        """The server's own word in what it answered."""
        code = _CODE.search(text)
        return code[1] if code else ""

    @property
    def is_refusal(self) -> bool:
        """The server says that the condition does not hold, and nothing else can be meant."""
        if self.is_missing_bucket or not isinstance(
            self.error, AlreadyExistsError | PreconditionError | Refused
        ):
            return False
        # AWS answers 404 to If-Match on a key that is not there.
        return self.status in (404, 412)

    @property
    def is_conflict(self) -> bool:
        """AWS: another conditional write is under way. Refused, but the state of the key is open."""
        return self.status == 409

    @property
    def is_missing_bucket(self) -> bool:
        """Not the key is missing, but all of it."""
        return self.code in _MISSING_BUCKET

    @property
    def is_certain(self) -> bool:
        """The request certainly had no effect, and trying again will not help."""
        if self.never_sent:
            return self.no_credentials
        if self.status is None:
            return self.wrong_region or isinstance(
                self.error, ValueError | NotImplementedError | NotSupportedError | NotThisWay
            )
        if isinstance(self.error, NotThisWay):
            return True
        return 400 <= self.status < 500 and self.status not in _RETRYABLE_4XX

    def explained(self, operation: str, key: str, shown_url: str) -> ForebayError:
        """The error to raise where the request certainly had no effect, or was a read."""
        if self.is_missing_bucket:
            return BucketMissing(shown_url)
        if isinstance(self.error, FileNotFoundError):
            return NotFound(key)
        where = f"{operation} {key!r} in {shown_url}" if key else f"{operation} {shown_url}"
        if self.never_sent:
            return self._unsent(where)
        if self.wrong_region:
            hint = "set the option region of the URL, or AWS_REGION"
            return NotDone(f"{where}: the bucket lies in another region", hint=hint)
        said = " ".join(filter(None, [str(self.status or ""), self.code])) or _first_line(self.error)
        return self._answered(f"{where}: {said}")

    def _unsent(self, where: str) -> ForebayError:
        if self.no_credentials:
            return AccessDenied(
                f"{where}: no credentials were found",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the like for other providers",
            )
        return Unavailable(f"{where}: cannot connect", hint="check the endpoint and that it is up")

    def _answered(self, message: str) -> ForebayError:
        is_denied = isinstance(self.error, PermissionDeniedError | UnauthenticatedError)
        if is_denied or self.status in (401, 403):
            return AccessDenied(message, hint=_CREDENTIALS_HINT)
        if self.status == 507:
            return StorageFull(message, hint="free space in the bucket's storage")
        if isinstance(self.error, NotSupportedError | NotImplementedError):
            return Unsupported(message, hint="this provider does not offer it")
        if self.is_certain:
            return NotDone(
                message, hint="the server refuses the request as it is; trying again will not help"
            )
        return Unavailable(message, hint="the server is busy or failing; try again later")


def _first_line(error: Exception) -> str:
    # The line names the URL of the request, which our message has already; what follows the dash is the news.
    return str(error).partition("\n")[0].rpartition(" - ")[2][:200]
