"""Folders of checkpoints, on this machine and elsewhere: whole or removed, and never written to twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from runtime.checkpoints import store
from runtime.checkpoints.store import Store
from runtime.config import Checkpoints, Settings
from tests.runtime.checkpoints.test_manifest import made


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "checkpoints")
        return
    yield "memory://bucket/checkpoints"
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs.clear()


@pytest.fixture
def kept(root: str, tmp_path: Path) -> Store:
    return Store(root, tmp_path / "saving")


def written(kept: Store, name: str = "x", seq_id: int = 3, weights: bytes = b"12345") -> str:
    """A whole checkpoint; its URL."""
    draft = kept.begin("run:train:0", "weights", name, seq_id)
    (draft.parts / "rank0.safetensors").write_bytes(b"part")
    (draft.folder / "model.safetensors").write_bytes(weights)
    assert kept.finish(draft, made()) > len(weights)
    kept.close(draft)
    return draft.url


def test_what_was_written_is_there_with_its_description(kept: Store, tmp_path: Path) -> None:
    url = written(kept)
    assert "run=3Atrain=3A0/weights/x.3-" in url
    assert kept.manifest(url).sizes == {"model.safetensors": 5}
    with kept.here(url) as folder:
        assert (folder / "model.safetensors").read_bytes() == b"12345"
        assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", "tinkerbus.json"]
    assert list((tmp_path / "saving").glob("*")) == []


def test_the_same_save_again_gets_another_folder(kept: Store) -> None:
    first, second = written(kept), written(kept, weights=b"67890")
    assert first != second
    assert kept.places() == {first, second}
    kept.remove(first)
    kept.remove(first)
    assert kept.places() == {second}
    with pytest.raises(FileNotFoundError):
        kept.manifest(first)
    with kept.here(second) as folder:
        assert (folder / "model.safetensors").read_bytes() == b"67890"


def test_a_draft_is_no_left_over_until_another_life_finds_it(kept: Store, root: str, tmp_path: Path) -> None:
    draft = kept.begin("run", "weights", "half", 4)
    (draft.folder / "model.safetensors").write_bytes(b"1")
    kept.finish(draft, made())
    assert kept.places() == set()
    later = Store(root, tmp_path / "saving")
    assert later.places() == {draft.url}
    later.remove(draft.url)
    assert later.places() == set()


def test_an_abandoned_draft_leaves_nothing(kept: Store, root: str, tmp_path: Path) -> None:
    draft = kept.begin("run", "weights", "half", 4)
    (draft.folder / "model.safetensors").write_bytes(b"1")
    kept.abandon(draft)
    assert Store(root, tmp_path / "other").places() == set()
    assert not draft.parts.exists()
    assert not draft.folder.exists()


def test_what_is_no_checkpoint_of_ours_is_left_alone(kept: Store, root: str) -> None:
    written(kept)
    fs, path = fsspec.core.url_to_fs(root)
    for name in ("notes", "x.3", "x.3-abc", "mine.1-0123456789ab.bak"):
        fs.makedirs(f"{path}/someone/weights/{name}", exist_ok=True)
        fs.pipe(f"{path}/someone/weights/{name}/file", b"x")
    assert len(kept.places()) == 1


def test_the_folder_begins_where_the_settings_say(tmp_path: Path) -> None:
    here = store.of_service(Settings(data=str(tmp_path)))
    assert written(here).startswith(f"file://{tmp_path}/checkpoints/run=3Atrain=3A0/weights/")
    at = Settings(data=str(tmp_path), checkpoints=Checkpoints(url=f"file://{tmp_path}/shared/"))
    url = written(store.of_service(at))
    own = url.removeprefix(f"file://{tmp_path}/shared/").split("/")[0]
    assert len(own) == 16
    assert store.of_service(at).places() == {url}
    other = Settings(data=str(tmp_path / "other"), checkpoints=at.checkpoints)
    assert store.of_service(other).places() == set()
