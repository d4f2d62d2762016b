"""The two conditions of a write that name no version. Both seams, objects and keys, use the same ones."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["ABSENT", "ANY", "Condition"]


class Condition(enum.Enum):
    """A condition of a write, beside the exact version."""

    ANY = "any version"
    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


ANY: Final = Condition.ANY
"""Write whatever is there."""
ABSENT: Final = Condition.ABSENT
"""Write only if nothing is there."""
