"""Writes the table of layouts in `docs/gates.md`: `make gates`. Takes some minutes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support import dumps, layouts
from tests.support.layouts import Figures, References
from tests.support.world import World

PAGE = Path(__file__).parents[1] / "docs" / "gates.md"
BEGIN, END = "<!-- table of layouts: begin -->", "<!-- table of layouts: end -->"
COLUMNS = (
    "layout",
    "trained",
    "windows",
    "against DP1",
    "against the reference",
    "logprobs, nats",
    "AdamW",
    "replicas",
    "left out",
)


def row(figures: Figures, single: Figures) -> str:
    """One line of the table; `single` has the figures of one rank."""
    windows = "bit-identical" if figures.one_window else "**differ**"
    replicas = f"{figures.compared} equal" if not figures.unequal else f"**{len(figures.unequal)} differ**"
    cells = (
        figures.layout,
        figures.trained,
        windows,
        f"{dumps.relative_l2(figures.windows['1×8'], single.windows['1×8']):.1e}",
        f"{figures.against_reference:.1e}",
        f"{figures.logprobs:.1e}",
        f"{figures.against_torch:.1e}",
        replicas if figures.has_replicas else "none",
        str(figures.left_out),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    single: dict[tuple[str, str], Figures] = {}
    with tempfile.TemporaryDirectory() as scratch, World(4) as world:
        root = Path(scratch)
        references = References(root)
        for name, (base, _) in layouts.LAYOUTS.items():
            for trained in layouts.TRAINED:
                figures = layouts.measure(world, root, references, name, trained)
                lines.append(row(figures, single.setdefault((base, trained), figures)))
                print(lines[-1], file=sys.stderr, flush=True)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))


if __name__ == "__main__":
    main()
