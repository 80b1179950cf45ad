"""The published schema of the bus: an AsyncAPI 3 document, generated from the structs.

`python -m bus.asyncapi > docs/asyncapi.json` writes it; a test holds the file to the structs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from bus.codec import JSON, MSGPACK, PROTOBUF
from bus.events import FORMAT, Result, Submission
from bus.subjects import PREFIX

_ID = {"description": "An id; bytes outside [A-Za-z0-9-_] are written =XX."}
_NUMBER = {"description": "The operation's number, or `end` for unload_model."}
_CONTENT_TYPE = {
    "type": "object",
    "properties": {"Content-Type": {"type": "string", "enum": [MSGPACK, JSON, PROTOBUF], "default": MSGPACK}},
}


def document() -> dict[str, Any]:
    """The document as plain data: the two channels a tenant can reach, and what travels on them."""
    (submission, result), schemas = msgspec.json.schema_components(
        [Submission, Result], ref_template="#/components/schemas/{name}"
    )
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "tinkerbus",
            "version": str(FORMAT),
            "description": "Training operations of event clients, and their results. Tensors in msgpack carry raw "
            "little-endian bytes where JSON has base64 or a list of numbers.",
        },
        "defaultContentType": MSGPACK,
        "channels": {
            "submit": {
                "address": f"{PREFIX}.submit.{{tenant}}.{{model_id}}",
                "parameters": {"tenant": _ID, "model_id": _ID},
                "messages": {"submission": {"$ref": "#/components/messages/submission"}},
            },
            "results": {
                "address": f"{PREFIX}.results.{{tenant}}.{{model_id}}.{{seq_id}}",
                "parameters": {"tenant": _ID, "model_id": _ID, "seq_id": _NUMBER},
                "messages": {"result": {"$ref": "#/components/messages/result"}},
            },
        },
        "operations": {
            "submit": {
                "action": "receive",
                "channel": {"$ref": "#/channels/submit"},
                "summary": "The broker's acknowledgement means stored; its refusal means the model's queue is full.",
            },
            "results": {
                "action": "send",
                "channel": {"$ref": "#/channels/results"},
                "summary": "Exactly one per operation, kept for 24 hours unless configured.",
            },
        },
        "components": {
            "messages": {
                "submission": {"headers": _CONTENT_TYPE, "payload": submission},
                "result": {"headers": _CONTENT_TYPE, "payload": result},
            },
            "schemas": schemas,
        },
    }


def text() -> str:
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
