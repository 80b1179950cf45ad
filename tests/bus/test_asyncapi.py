"""The published schema is that of the structs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bus import asyncapi, events

PUBLISHED = Path(__file__).parents[2] / "docs" / "asyncapi.json"


def test_the_published_document_is_the_generated_one() -> None:
    assert PUBLISHED.read_text() == asyncapi.text(), "run: python -m bus.asyncapi > docs/asyncapi.json"


def test_every_operation_and_outcome_is_in_it_and_every_reference_resolves() -> None:
    document = asyncapi.document()
    schemas = document["components"]["schemas"]
    for union in (events.Op, events.Outcome):
        for struct in union.__args__:
            assert schemas[struct.__name__]["properties"]["type"]["enum"] == [struct.__struct_config__.tag]
            assert schemas[struct.__name__]["additionalProperties"] is False

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for item in value.values() for ref in references(item)]
        return [ref for item in value for ref in references(item)] if isinstance(value, list) else []

    found = references(msgspec.to_builtins(document))
    assert found
    for reference in found:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
