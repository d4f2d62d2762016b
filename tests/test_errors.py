from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from forebay import errors
from forebay.errors import ForebayError

KINDS = [getattr(errors, name) for name in errors.__all__]
EXAMPLES: list[ForebayError] = [
    errors.ForebayError("something", hint="do this"),
    errors.InvalidKey("a//b", "a part is empty", hint="use single slashes"),
    errors.LimitExceeded("KEY_BYTES_MAX", limit=900, actual=1_234, hint="shorten it"),
    errors.NotFound("a/b"),
    errors.PreconditionFailed("a/b", expected="v1", actual="v2"),
    errors.OutcomeUnknown("put of a/b", reason="timed out"),
    errors.Unavailable("no answer", hint="is it running?"),
]


def drawn_tree() -> dict[str, str]:
    """Name to parent, as the docstring of the module draws them."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        match = re.fullmatch(r"    ((?:[│ ]   )*(?:[├└]── )?)([A-Z][A-Za-z]+)(?:  +.*)?", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else ""
    return parents


def test_the_drawn_tree_is_the_class_tree() -> None:
    real = {
        kind.__name__: next((base.__name__ for base in kind.__bases__ if issubclass(base, ForebayError)), "")
        for kind in KINDS
    }
    assert drawn_tree() == real


def test_every_error_is_public() -> None:
    bound = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ForebayError)
    }
    assert bound == set(errors.__all__)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("transport", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_errors_cross_process_boundaries_with_their_fields(error: ForebayError, transport: object) -> None:
    assert callable(transport)
    other = transport(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_error_is_both_certain_and_uncertain(kind: type[ForebayError]) -> None:
    assert not (issubclass(kind, errors.NotDone) and issubclass(kind, errors.OutcomeUnknown))


def test_usage_errors_are_value_errors_and_missing_things_lookup_errors() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.NotFound, LookupError)


def test_limit_exceeded_tells_name_limit_and_actual_value() -> None:
    error = errors.LimitExceeded("VALUE_BYTES_MAX", limit=1_048_576, actual=2_000_000, hint="use an object")
    assert str(error) == "VALUE_BYTES_MAX: 2,000,000 is over the limit of 1,048,576"
    assert (error.name, error.limit, error.actual, error.hint) == (
        "VALUE_BYTES_MAX",
        1_048_576,
        2_000_000,
        "use an object",
    )


def test_precondition_failed_names_what_was_found_only_where_it_is_known() -> None:
    assert str(errors.PreconditionFailed("k", expected="v1", actual="v2")) == "'k': expected v1, found v2"
    assert str(errors.PreconditionFailed("k", expected="absent")) == "'k': expected absent"


def test_an_endless_key_does_not_make_an_endless_message() -> None:
    error = errors.InvalidKey("k" * 100_000, "too long")
    assert len(str(error)) < 300
    assert len(error.key) == 100_000


def test_outcome_unknown_always_warns_before_a_retry() -> None:
    assert "may have taken effect" in errors.OutcomeUnknown("put").hint
    assert errors.OutcomeUnknown("put", hint="look at x").hint == "look at x"
