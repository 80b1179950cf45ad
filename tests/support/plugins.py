"""Packages that bring losses: the example as pip installs it, and any others by hand."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "loss_plugin"


def install_example(folder: Path) -> Path:
    """The example's package in `folder`, as pip installs it; without a network."""
    source = folder.with_name(f"{folder.name}-source")
    shutil.copytree(EXAMPLE, source)  # the build leaves files behind
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder), str(source)],
        check=True,
        capture_output=True,
        text=True,
    )
    return folder


def install(folder: Path, package: str, losses: Mapping[str, str], **modules: str) -> Path:
    """A package of these entry points and modules, given by their source, as an installer would leave it."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in losses.items())
    (info / "entry_points.txt").write_text(f"[tinkerbus.losses]\n{lines}")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    return folder
