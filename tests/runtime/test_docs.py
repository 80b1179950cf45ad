"""What the documentation says of settings and losses is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

import loss_hub
from runtime.config import Settings, load

DOCS = Path(__file__).parents[2] / "docs"


def _toml_of(page: str) -> str:
    found = re.search(r"```toml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_configuration_page_shows_every_setting_with_its_default(tmp_path: Path) -> None:
    text = _toml_of("configuration.md")
    without_tenants = re.sub(r"\[tenants\.alice\].*?(?=\n\[)", "", text, flags=re.DOTALL)
    file = tmp_path / "tinkerbus.toml"
    file.write_text(without_tenants)
    assert load(file, environment={}) == Settings()
    # Settings without a default value stand there as comments.
    shown = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", without_tenants, flags=re.MULTILINE))
    wanted = msgspec.to_builtins(Settings())
    assert {k: v.keys() if isinstance(v, dict) else None for k, v in shown.items()} == {
        k: v.keys() if isinstance(v, dict) else None for k, v in wanted.items() if k != "tenants"
    }
    assert tomllib.loads(text)["tenants"]["alice"].keys() == {"api_keys", "nats_password"}


def test_the_losses_page_names_every_loss_and_its_configuration() -> None:
    text = (DOCS / "losses.md").read_text()
    rows = {
        name: line for line in text.splitlines() if (m := re.match(r"\| `(\w+)`", line)) for name in [m[1]]
    }
    built_in = [n for n in loss_hub.names() if loss_hub.get(n).function.__module__.startswith("loss_hub.")]
    assert set(rows) == set(built_in)
    for name, row in rows.items():
        loss = loss_hub.get(name)
        for spec in loss.inputs:
            assert spec.name in row or "same" in row, (name, spec.name)
        for field, default in (
            vars(loss.config()).items() if hasattr(loss.config(), "__dict__") else _slots(loss)
        ):
            assert f"`{field}` ({default})" in row, (name, field)


def _slots(loss: loss_hub.registry.Loss) -> list[tuple[str, object]]:
    config = loss.config()
    return [(name, getattr(config, name)) for name in getattr(config, "__slots__", ())]
