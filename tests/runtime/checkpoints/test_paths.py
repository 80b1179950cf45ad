"""Paths of checkpoints: what parses, what does not, and that no path leads anywhere but to a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoints.paths import KINDS, MAX_NAME_BYTES, CheckpointPath, parse, wrong_name


def test_a_path_names_model_kind_and_name() -> None:
    path = parse("tinker://0f3-a:train:12/sampler_weights/step 10.final")
    assert path == CheckpointPath("0f3-a:train:12", "sampler_weights", "step 10.final")


@given(
    st.text(min_size=1).filter(lambda m: "/" not in m),
    st.sampled_from(KINDS),
    st.text(min_size=1, max_size=60).filter(lambda n: wrong_name(n) is None),
)
def test_what_is_written_is_read(model_id: str, kind: str, name: str) -> None:
    path = CheckpointPath(model_id, kind, name)  # type: ignore[arg-type]
    assert parse(str(path)) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "run/weights/x",
        "https://run/weights/x",
        "tinker://run/weights",
        "tinker://run/weights/",
        "tinker:///weights/x",
        "tinker://run/snapshots/x",
        "tinker://run/weights/..",
        "tinker://run/weights/a\nb",
        "/etc/passwd",
        f"tinker://run/weights/{'x' * (MAX_NAME_BYTES + 1)}",
    ],
)
def test_anything_else_is_refused_and_named(path: str) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint's"):
        parse(path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\0", "ü" * 34])
def test_names_that_cannot_be_a_folders(name: str) -> None:
    assert wrong_name(name) is not None


def test_a_name_of_dots_and_spaces_will_do() -> None:
    assert wrong_name("v1.0 final") is None
    assert wrong_name("ü" * 33) is None
