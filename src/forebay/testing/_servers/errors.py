"""What can go wrong before a server answers: it cannot be had here, or it was started and failed."""

from __future__ import annotations

from forebay.errors import Unavailable, Unsupported

__all__ = ["ServerFailed", "ServerUnavailable"]


class ServerUnavailable(Unsupported):
    """This machine cannot have the server: no program, no toolchain, no module. Tests skip on it."""


class ServerFailed(Unavailable):
    """The server was started and died, or did not get ready in time. Tests fail on it."""

    def __init__(self, message: str, *, output: str, hint: str = "") -> None:
        super().__init__(f"{message}\n{output}" if output else message, hint=hint)
        self.output = output
        """The end of what the server printed."""
