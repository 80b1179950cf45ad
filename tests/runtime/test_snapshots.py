"""Snapshots on the disk: whole or not there, the newest two, and what is broken costs time alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.contract import AdapterConfig, FullConfig
from bus.errors import NewerFormat
from runtime import fingerprint, snapshots
from runtime.fingerprint import FingerprintDiffers
from runtime.lost_calls import OpenWindow
from runtime.sequencer import LaneState
from runtime.snapshots import Manifest, Snapshots

ADAPTER = AdapterConfig(rank=4, alpha=32.0, seed=7, train_mlp=False)


def manifest(next_seq: int, model_id: str = "run:train:0") -> Manifest:
    lane = LaneState(next_seq=next_seq, lost=2, lost_before=9, log_from=next_seq + 3)
    window = OpenWindow({next_seq - 1: 40}, last_step=next_seq - 3)
    return snapshots.manifest(model_id, ADAPTER, lane, window, {"torch": "2"})


def taken(kept: Snapshots, next_seq: int, model_id: str = "run:train:0") -> None:
    aside = kept.begin(model_id)
    (aside / "rank0.pt").write_bytes(b"x" * next_seq)
    kept.commit(aside, manifest(next_seq, model_id))


def numbers(kept: Snapshots, model_id: str = "run:train:0") -> list[int]:
    return [found.manifest.lane.next_seq for found in kept.of(model_id)]


def test_a_snapshot_comes_back_as_it_was_taken(tmp_path: Path) -> None:
    taken(Snapshots(tmp_path), 5)
    (found,) = Snapshots(tmp_path).of("run:train:0")
    assert found.manifest.lane == LaneState(next_seq=5, lost=2, lost_before=9, log_from=8)
    assert found.manifest.window == OpenWindow({4: 40}, last_step=2)
    assert found.manifest.config == ADAPTER
    assert found.manifest.fingerprint == {"torch": "2"}
    assert (found.folder / "rank0.pt").read_bytes() == b"xxxxx"


def test_a_model_that_trains_every_parameter_is_told_from_an_adapter(tmp_path: Path) -> None:
    kept = Snapshots(tmp_path)
    kept.commit(
        kept.begin("m"), snapshots.manifest("m", FullConfig(), LaneState(next_seq=1), OpenWindow(), {})
    )
    assert kept.of("m")[0].manifest.config == FullConfig()


def test_the_newest_two_of_each_model_are_kept(tmp_path: Path) -> None:
    kept = Snapshots(tmp_path)
    for next_seq in (3, 12, 7, 100):
        taken(kept, next_seq)
    taken(kept, 1, "other")
    assert numbers(kept) == [100, 12]
    assert numbers(kept, "other") == [1]
    assert numbers(kept, "unknown") == []


def test_one_that_was_not_finished_is_not_there_and_goes_with_the_next_life(tmp_path: Path) -> None:
    kept = Snapshots(tmp_path)
    taken(kept, 3)
    (kept.begin("run:train:0") / "rank0.pt").write_bytes(b"half")
    assert numbers(kept) == [3]
    assert numbers(Snapshots(tmp_path)) == [3]
    assert not list(tmp_path.glob("*/aside-*"))


@pytest.mark.parametrize("harm", ["shorter", "gone", "no manifest", "not json"])
def test_one_that_is_broken_leaves_the_older(tmp_path: Path, harm: str) -> None:
    kept = Snapshots(tmp_path)
    for next_seq in (3, 6):
        taken(kept, next_seq)
    newest = kept.of("run:train:0")[0].folder
    match harm:
        case "shorter":
            (newest / "rank0.pt").write_bytes(b"xxx")
        case "gone":
            (newest / "rank0.pt").unlink()
        case "no manifest":
            (newest / "manifest.json").unlink()
        case "not json":
            (newest / "manifest.json").write_text("{")
    assert numbers(kept) == [3]


def test_one_of_a_newer_version_is_refused_by_its_format_number(tmp_path: Path) -> None:
    kept = Snapshots(tmp_path)
    taken(kept, 3)
    file = kept.of("run:train:0")[0].folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2, "what_is_new": 1}))
    with pytest.raises(NewerFormat, match="format 2"):
        kept.of("run:train:0")


def test_a_replay_that_comes_to_the_same_place_takes_it(tmp_path: Path) -> None:
    kept = Snapshots(tmp_path)
    taken(kept, 3)
    taken(kept, 3)
    assert numbers(kept) == [3]


def test_a_model_that_ended_leaves_nothing(tmp_path: Path) -> None:
    kept = Snapshots(tmp_path)
    taken(kept, 3)
    kept.forget("run:train:0")
    kept.forget("run:train:0")
    assert list(tmp_path.iterdir()) == []


def test_operations_that_failed_while_it_was_written_stand_in_it_unless_their_window_was_over() -> None:
    whole = snapshots.with_failures(manifest(5), {1: 50, 2: 51, 3: 52})
    assert whole.window == OpenWindow({3: 52, 4: 40}, last_step=2)


def test_the_same_fingerprint_differs_in_nothing() -> None:
    same = {"torch": "2.13", "layout": "dp=1"}
    assert fingerprint.compare(same, dict(same), accept_new_bits=False) == []


def test_another_torch_is_refused_until_it_is_accepted() -> None:
    old, new = {"torch": "2.13", "layout": "dp=1"}, {"torch": "2.14", "layout": "dp=1"}
    with pytest.raises(FingerprintDiffers, match=r"torch was 2\.13 and is 2\.14.*recovery\.accept_new_bits"):
        fingerprint.compare(old, new, accept_new_bits=False)
    assert fingerprint.compare(old, new, accept_new_bits=True) == ["torch was 2.13 and is 2.14"]


@pytest.mark.parametrize("name", ["layout", "model"])
def test_another_layout_or_model_is_refused_in_any_case(name: str) -> None:
    with pytest.raises(FingerprintDiffers, match=rf"was old and is new; go on with the old {name}"):
        fingerprint.compare({name: "old"}, {name: "new"}, accept_new_bits=True)
