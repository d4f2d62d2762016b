"""Which keys are taken: most are told by one look, and it takes none that the long way refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import InvalidKey
from forebay.storage import _api as api
from forebay.storage._api import KEY_BYTES_MAX, KEY_PART_BYTES_MAX, parents_of, validate_key


def _takes(key: str) -> bool:
    try:
        return validate_key(key) == key
    except InvalidKey:
        return False


@given(st.text("aZ0._=-~/ \\\n\u00e4", max_size=12))
def test_the_short_look_takes_no_key_that_the_long_way_refuses(key: str) -> None:
    taken = _takes(key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_is_plain_key", lambda _: None)
        assert _takes(key) == taken


@pytest.mark.parametrize(
    ("key", "taken"),
    [
        ("a" * KEY_PART_BYTES_MAX, True),
        ("a" * (KEY_PART_BYTES_MAX + 1), False),
        ("a/" * (KEY_BYTES_MAX // 2 - 1) + "aa", True),
        ("a/" * (KEY_BYTES_MAX // 2) + "a", False),
        (".forebay/a", False),
        ("a/.forebay", True),
        ("a/../b", False),
        ("..a/b", True),
    ],
)
def test_limits_and_reserved_names_hold(key: str, taken: bool) -> None:
    assert _takes(key) == taken


def test_the_directories_of_a_key_are_all_that_end_before_a_slash() -> None:
    assert parents_of("a/bc/d") == ["a", "a/bc"]
    assert parents_of("a") == []
