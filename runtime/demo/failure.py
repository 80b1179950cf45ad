"""Why a demo could not go on."""

from __future__ import annotations


class DemoFailed(Exception):
    """`str()` is made for whoever started the demo."""
