from __future__ import annotations

import pickle

from forebay.kit import conditions
from forebay.kit.conditions import ABSENT, ANY, Condition


def test_there_are_two_conditions_and_both_have_names() -> None:
    assert set(Condition) == {ANY, ABSENT}
    assert conditions.ANY is Condition.ANY
    assert conditions.ABSENT is Condition.ABSENT


def test_a_condition_never_equals_a_version() -> None:
    versions: list[object] = ["any version", "absent", 0, -1, None]
    for condition in Condition:
        assert condition not in versions


def test_conditions_read_well_in_messages() -> None:
    assert f"expected {ABSENT}" == "expected absent"
    assert f"expected {ANY}" == "expected any version"


def test_conditions_stay_the_same_object_across_processes() -> None:
    assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT
