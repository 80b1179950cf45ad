"""The built-in model: the same bits wherever it is built, and a tokenizer that loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from actors.models import tiny
from actors.models.families import spec_of


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_it_is_built_once(tiny_folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in tiny_folder.iterdir()}
    assert tiny.ensure(tiny_folder) == tiny_folder
    assert {file: file.stat().st_mtime_ns for file in tiny_folder.iterdir()} == before


def test_two_builds_have_the_same_bytes_and_leave_the_callers_random_numbers_alone(
    tiny_folder: Path, tmp_path: Path
) -> None:
    import torch

    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    again = tiny.ensure(tmp_path / "new" / "tiny")
    assert torch.equal(torch.rand(3), wanted)
    assert contents(again) == contents(tiny_folder)


def test_a_second_builder_that_is_faster_wins_and_nothing_else_is_left(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer = tiny.tokenizer

    def overtaken() -> Any:
        monkeypatch.setattr(tiny, "tokenizer", make_tokenizer)
        tiny.ensure(tmp_path / "tiny")  # in the same process, while the first one is at work
        return make_tokenizer()

    monkeypatch.setattr(tiny, "tokenizer", overtaken)
    assert contents(tiny.ensure(tmp_path / "tiny")) == contents(tiny_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "something else").touch()
    with pytest.raises(OSError, match="not empty"):
        tiny.ensure(tmp_path / "tiny")


@pytest.mark.slow
def test_two_processes_build_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    code = "import sys, pathlib; from actors.models import tiny; tiny.ensure(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "tiny")]
    builders = [subprocess.Popen(command) for _ in range(2)]
    assert [builder.wait() for builder in builders] == [0, 0]
    assert contents(tmp_path / "tiny") == contents(tiny_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_it_is_a_tied_qwen3_of_a_few_million_parameters(tiny_folder: Path) -> None:
    spec = spec_of(tiny_folder)
    assert (spec.family, spec.tied_embeddings, spec.vocab_size) == ("qwen3", True, tiny.VOCAB_SIZE)
    weights = tiny_folder / "model.safetensors"
    assert 3e6 < weights.stat().st_size / 4 < 4e6  # float32


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder)


@given(text=st.text())
@example(text="<|im_start|>a<|im_end|>")
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    if not any(special in text for special in tiny.SPECIAL_TOKENS):
        assert len(tokens) == len(text.encode())


def test_each_byte_has_a_token_of_its_own_below_256(tokenizer: Any) -> None:
    # 0 to 127 stand alone; 128 to 255 are the continuation and lead bytes of these.
    text = "".join(map(chr, range(128))) + "".join(chr(0x80 + i) for i in range(64)) + "ÀßĀ߿ࠀ𐀀\U0010ffff"
    ids = tokenizer.encode(text, add_special_tokens=False)
    byte_of = dict(zip(ids, text.encode(), strict=True))
    assert len(set(byte_of.values())) == len(byte_of)
    assert all(byte_of[i] == b for i, b in zip(ids, text.encode(), strict=True))
    assert max(byte_of) < 256


@pytest.mark.parametrize("text", ["a . b , c", " don 't", "\r\n\t  x  ", "e\u0301 é", "日本 🙂\u200d", ""])
def test_blanks_and_composed_characters_stay_as_they_are(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_one_id_each_and_end_the_text(tokenizer: Any) -> None:
    assert tokenizer.encode("<|endoftext|>a<|im_end|>", add_special_tokens=False)[::2] == [256, 258]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert tokenizer.decode([256, 257, 258]) == "<|endoftext|><|im_start|><|im_end|>"
