from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import subjects
from bus.events import parse_request_id, request_id

IDS = st.text(min_size=1).filter(lambda s: s.encode("utf-8", "ignore").decode() == s)


@given(IDS)
def test_any_id_becomes_one_token_and_comes_back(name: str) -> None:
    token = subjects.escape(name)
    assert not set(token) & set(" .*>\t\r\n")
    assert subjects.unescape(token) == name


@pytest.mark.parametrize("token", ["", "=3a", "=4", "a b", "=41", "ü", "=ZZ", "=+1"])
def test_what_escape_cannot_have_made_is_refused(token: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any ValueError: the callers catch just that
        subjects.unescape(token)


@given(IDS, IDS, st.none() | st.integers(0, 2**63))
def test_a_subject_splits_into_what_it_was_made_of(tenant: str, model_id: str, seq_id: int | None) -> None:
    kind, found_tenant, found_model, number = subjects.split(subjects.results(tenant, model_id, seq_id))
    assert (kind, found_tenant, found_model) == ("results", tenant, model_id)
    assert subjects.parse_seq_token(number) == seq_id


def test_a_stored_announcement_has_a_subject_of_its_own() -> None:
    assert subjects.stored(subjects.ops("g", "m", 3)) == "tinker.v1.stored.ops.g.m.3"


@given(IDS, st.none() | st.integers(0, 2**63))
def test_request_ids_come_back(model_id: str, seq_id: int | None) -> None:
    assert parse_request_id(request_id(model_id, seq_id)) == (model_id, seq_id)
