"""Losses of other packages: found where they are installed, left out with a reason where they cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loss_hub
from loss_hub import DatumInputs, check, evaluate, registry
from loss_hub.plugins import Plugins
from tests.support import plugins

HEAD = "from loss_hub import TARGETS, LossTerms, loss\n"


def source(function: str, registered: str | None = None) -> str:
    name = registered or function
    body = "return LossTerms(per_token=-3 * logprobs_N)"
    return f"{HEAD}@loss({name!r}, inputs=(TARGETS,))\ndef {function}(logprobs_N, batch, config): {body}\n"


Add = Callable[[Path], None]


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Add:
    """`add(folder)`: what is installed there, as a fresh process finds it. Its modules have names of their own."""

    def put(folder: Path) -> None:
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
        monkeypatch.setattr(registry, "_PLUGINS", Plugins())
        for module in folder.glob("*.py"):
            monkeypatch.delitem(sys.modules, module.stem, raising=False)

    return put


def the_one_left_out() -> str:
    (sentence,) = loss_hub.left_out()
    assert "\n" not in sentence
    return sentence


def test_an_installed_loss_is_known_by_its_name(add: Add, tmp_path: Path) -> None:
    add(plugins.install(tmp_path, "triple-loss", {"triple": "triple_a:triple"}, triple_a=source("triple")))
    assert "triple" in loss_hub.names()
    assert loss_hub.left_out() == ()
    request = check("triple", {}, [DatumInputs(2, {"target_tokens": torch.tensor([1, 2])})])
    found = evaluate(request.loss, torch.tensor([-1.0, -0.5]), request.batch([0]), request.config)
    assert found.metrics["loss:sum"] == 4.5


def test_a_package_whose_module_was_imported_before_is_found_all_the_same(add: Add, tmp_path: Path) -> None:
    add(plugins.install(tmp_path, "triple-loss", {"triple": "triple_b:triple"}, triple_b=source("triple")))
    __import__("triple_b")
    assert loss_hub.left_out() == ()
    assert loss_hub.get("triple").function.__module__ == "triple_b"


@pytest.mark.parametrize(
    ("name", "value", "text", "because"),
    [
        ("gone", "no_such_module_c:f", "", "ModuleNotFoundError: No module named 'no_such_module_c'"),
        ("odd", "odd_c:odd", "raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("odd", "odd_d:odd", "import sys; sys.exit('bye')", "SystemExit: bye"),
        ("odd", "odd_e:other", source("odd"), "AttributeError: module 'odd_e' has no attribute 'other'"),
        ("odd", "odd_f:odd", "def odd(): pass", "odd_f:odd is no function that @loss registers"),
        ("odd", "odd_g", source("odd"), "odd_g is no function that @loss registers"),
        (
            "odd",
            "odd_h:odd",
            source("odd", "even"),
            "is the loss 'even'; the entry point must have that name",
        ),
        ("ppo", "odd_i:ppo", source("ppo"), "'ppo' is registered already: loss_hub.losses.ppo.ppo"),
        (
            "ppo",
            "odd_j:odd",
            source("odd"),
            "odd_j:odd is the loss 'odd'; the entry point must have that name",
        ),
        (
            "odd",
            "odd_k:odd",
            source("odd")
            + "from loss_hub import registry\nregistry._LOSSES['ppo'] = registry._LOSSES['odd']\n",
            "it replaces the loss 'ppo'",
        ),
    ],
)
def test_a_broken_one_is_left_out_in_one_sentence_and_changes_nothing(
    add: Add, tmp_path: Path, name: str, value: str, text: str, because: str
) -> None:
    before = {known: loss_hub.get(known) for known in loss_hub.names()}
    module = value.partition(":")[0]
    add(plugins.install(tmp_path, "odd-loss", {name: value}, **({module: text} if text else {})))
    sentence = the_one_left_out()
    assert sentence.startswith(f"loss plug-in {name!r} ({value} of odd-loss) is left out: ")
    assert because in sentence
    assert {known: loss_hub.get(known) for known in loss_hub.names()} == before


def test_one_broken_package_takes_no_other_with_it(add: Add, tmp_path: Path) -> None:
    plugins.install(tmp_path, "odd-loss", {"odd": "odd_l:odd"}, odd_l="1 / 0")
    add(plugins.install(tmp_path, "triple-loss", {"triple": "triple_l:triple"}, triple_l=source("triple")))
    assert "triple" in loss_hub.names()
    assert "ZeroDivisionError" in the_one_left_out()


def test_of_two_packages_with_one_name_the_second_is_left_out(add: Add, tmp_path: Path) -> None:
    plugins.install(tmp_path, "a-loss", {"triple": "triple_m:triple"}, triple_m=source("triple"))
    add(plugins.install(tmp_path, "b-loss", {"triple": "triple_n:triple"}, triple_n=source("triple")))
    assert loss_hub.get("triple").function.__module__ == "triple_m"
    assert "'triple' is registered already: triple_m.triple" in the_one_left_out()


@pytest.mark.slow
def test_a_fresh_process_lists_the_installed_example_and_names_what_is_broken(tmp_path: Path) -> None:
    folder = plugins.install_example(tmp_path / "installed")
    plugins.install(folder, "odd-loss", {"ppo": "odd_o:ppo"}, odd_o=source("ppo"))
    listed = subprocess.run(
        [str(Path(sys.executable).with_name("tinkerbus")), "losses"],
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    rows = {line.split("│")[1].strip(): line for line in listed.stdout.splitlines() if line.count("│") == 6}
    assert "gamma (2.0)" in rows["focal"]
    assert "focal_loss" in rows["focal"]
    assert "loss_hub.losses.ppo" in rows["ppo"]
    (line,) = listed.stderr.splitlines()
    assert line.startswith("tinkerbus: loss plug-in 'ppo' (odd_o:ppo of odd-loss) is left out: ")
    assert listed.returncode == 1
