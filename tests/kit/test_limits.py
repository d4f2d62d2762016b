from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LimitExceeded, UsageError
from forebay.kit.limits import Limit, format_bytes, parse_bytes, parse_duration_ms


def test_a_limit_lets_its_own_value_pass_and_nothing_above() -> None:
    limit = Limit("RECORD_BYTES_MAX", 1_000, "split the record")
    assert limit.check(1_000) == 1_000
    with pytest.raises(LimitExceeded) as caught:
        limit.check(1_001)
    error = caught.value
    assert (error.name, error.limit, error.actual, error.hint) == (
        "RECORD_BYTES_MAX",
        1_000,
        1_001,
        "split the record",
    )


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="limit X is -1"):
        Limit("X", -1)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("1kB", 1_000),
        ("1KB", 1_000),
        ("32MB", 32_000_000),
        ("4GB", 4_000_000_000),
        ("500GB", 500_000_000_000),
        ("64MiB", 67_108_864),
        ("1.5GiB", 1_610_612_736),
        ("1.1kB", 1_100),
        ("2 TiB", 2_199_023_255_552),
        (" 8PiB ", 9_007_199_254_740_992),
        (0, 0),
        (33_554_432, 33_554_432),
        ("9007199254740993", 9_007_199_254_740_993),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes_are_read_exactly(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "MB", "-1", "-1MB", "+1MB", "1e6", "1,000", "1_000", "1.MB", ".5MB", "1..5MB"],
        *["10m", "10M", "1mb", "1Mb", "1mib", "1 M B", "1MB 2MB", "0x10", "nan", "inf", "1MB\x00"],
        *["\N{ARABIC-INDIC DIGIT THREE}MB", "1.5B", "0.0001KiB", -1, True, False, 1.5, None, b"1MB", ["1MB"]],
    ],
    ids=repr,
)
def test_what_is_no_size_is_refused_with_the_units_in_the_hint(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size") as caught:
        parse_bytes(text)
    assert "MiB" in caught.value.hint


@pytest.mark.parametrize("text", ["9223372036854775808", "10000PiB", 2**63])
def test_sizes_beyond_64_bits_are_over_the_limit(text: str | int) -> None:
    with pytest.raises(LimitExceeded, match="BYTES_LIMIT"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0ms", 0),
        ("25ms", 25),
        ("15s", 15_000),
        ("1.5s", 1_500),
        ("0.001s", 1),
        ("10m", 600_000),
        ("72h", 259_200_000),
        ("7d", 604_800_000),
        ("7 d", 604_800_000),
    ],
)
def test_durations_are_read_in_milliseconds(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    ["", "25", "0", "ms", "-1s", "1S", "1 sec", "1us", "1M", "1MB", "0.5ms", "1m30s", "1:30", 25, 1.5, None],
    ids=repr,
)
def test_what_is_no_duration_is_refused_with_the_units_in_the_hint(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration") as caught:
        parse_duration_ms(text)
    assert "25ms" in caught.value.hint


def test_a_duration_without_a_unit_is_told_so() -> None:
    with pytest.raises(UsageError, match="it has no unit"):
        parse_duration_ms("25")


def test_durations_beyond_48_bits_are_over_the_limit() -> None:
    with pytest.raises(LimitExceeded, match="DURATION_MS_LIMIT"):
        parse_duration_ms("9999999d")


def test_endless_input_makes_a_short_message() -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes("9" * 1_000_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (64 * 1024**2, "64.0 MiB"),
        (1024**5 * 2000, "2000 PiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_negative_size_is_not_shown() -> None:
    with pytest.raises(UsageError, match="negative"):
        format_bytes(-1)


@given(st.integers(0, 2**60))
def test_a_shown_size_is_within_a_percent_of_the_real_one(size: int) -> None:
    number, unit = format_bytes(size).split(" ")
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}[unit]
    assert abs(float(number) * factor - size) <= size * 0.01
    assert len(number) <= 4


@given(st.integers(0, 2**63 - 1))
def test_plain_numbers_of_bytes_survive(size: int) -> None:
    assert parse_bytes(str(size)) == parse_bytes(f"{size}B") == parse_bytes(size) == size
