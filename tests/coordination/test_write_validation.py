"""The quick look at the operations of a write accepts exactly what the long one accepts."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.coordination import Put
from forebay.coordination._api import KEY_BYTES_MAX, _validate_operation, validate_operations
from forebay.errors import UsageError
from forebay.kit.conditions import ABSENT, ANY

CONDITIONS = [ANY, ABSENT, 0, 7, 1 << 62, -1, True, 1.0, None, "1"]
HOMES = [None, "t:0", "é", "k" * KEY_BYTES_MAX, "", "k" * (KEY_BYTES_MAX + 1), "é" * KEY_BYTES_MAX, b"t:0", 5]


def outcome(check: Any, operation: Put) -> object:
    try:
        return check(operation)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("when", CONDITIONS, ids=repr)
@pytest.mark.parametrize("home", HOMES, ids=lambda home: repr(home)[:12])
def test_conditions_and_partition_keys_are_judged_alike(when: Any, home: Any) -> None:
    put = Put("a/b", b"value", when, partition_key=home)
    assert outcome(lambda one: validate_operations([one]), put) == outcome(_validate_operation, put)


def test_an_operation_cannot_be_changed_and_equals_another_of_the_same_fields() -> None:
    put = Put("a/b", b"value", 3, partition_key="p")
    with pytest.raises(AttributeError):
        put.key = "c"  # type: ignore[misc]
    assert put == Put("a/b", b"value", 3, None, "p") != Put("a/b", b"value", 4, None, "p")
