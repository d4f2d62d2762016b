"""What the whole suite shares: how hypothesis behaves on a slow, shared machine, and what Ctrl-C does."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# No deadlines: a test is never judged by the machine's load. In CI examples are the same in every run, so
# that a failure can be repeated; elsewhere every run looks at new ones.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _COMMON)
settings.register_profile("ci", _COMMON, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")

# A shell that starts something in the background lets it ignore Ctrl-C, and all that it starts in turn: the
# commands that tests interrupt would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
