"""Two thousand bodies that no client would send: each gets an answer, and none of them is 5xx.

Mutations of real requests, to every endpoint that takes a body, and to paths and queries of the others; the seed is
fixed, so that a failure comes again.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import zstandard

from bus.codec import encode
from bus.events import OptimStep
from runtime.ingress.app import build
from runtime.ingress.compatibility import ENDPOINTS, Endpoint
from tests.runtime.ingress.checkpoints import put
from tests.runtime.ingress.conftest import Wire, sdk_body
from tests.runtime.stand_in import Replica, Service

BODIES = 2000
AT_ONCE = 16
SEED = 20261203

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308),
    *(
        "",
        "a",
        "..",
        "../..",
        "a/b",
        "\x00",
        "é\ud800",
        "x" * 5000,
        "tinker://",
        "tinker://a/weights/b",
        "9" * 400,
    ),
    *([], {}, [None], [[[]]], {"type": "user"}, {"": {}}, {"type": 5}),
)
CONTENT_TYPES = (
    *("application/json", "application/x-protobuf", "application/msgpack", "text/plain", ""),
    *("application/json; charset=utf-16", "application/x-protobuf; x", "multipart/form-data"),
)


class Fuzzer:
    """Requests, one after the other, from one seed."""

    def __init__(self, model: str, session: str, path: str) -> None:
        self._random = random.Random(SEED)
        self._model, self._session = model, session
        self._known: dict[str, Any] = {
            "model_id": model,
            "session_id": session,
            "seq_id": 1,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
            "adam_params": {"learning_rate": 0.1},
            "request_id": f"{model}#0",
            "path": path,
            "tinker_path": path,
            "source_path": path,
            "destination_project_id": "alice",
            "ttl_seconds": 3600,
            "user_metadata": {"a": "b"},
            "tags": ["a"],
            "limit": 5,
            "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "s"},
            "statuses": [{"type": "active"}],
            "owner": {"type": "own"},
            "reason": {"type": "success"},
            "forward_input": self._batch(),
            "forward_backward_input": self._batch(),
            "sdk_version": "0.38.0",
        }

    def request(self) -> dict[str, Any]:
        """Arguments of `httpx.AsyncClient.request`."""
        pick = self._random
        endpoint = pick.choice(ENDPOINTS)
        headers = {"content-type": pick.choice(CONTENT_TYPES)}
        body = b""
        if endpoint.method in ("POST", "PUT"):
            kind, made = pick.choice(
                (self._json, self._json, self._json, self._protobuf, self._msgpack, self._noise)
            )(endpoint)
            body = self._mutated(made) if pick.random() < 0.4 else made
            if kind and pick.random() < 0.8:
                headers["content-type"] = kind
            if pick.random() < 0.2:
                headers["content-encoding"] = pick.choice(("zstd", "zstd", "zstd", "gzip", "ZSTD "))
                packed = zstandard.compress(body if pick.random() < 0.9 else bytes(80_000_000))
                body = self._mutated(packed) if pick.random() < 0.4 else packed
        if pick.random() < 0.2:
            headers["accept"] = pick.choice(("application/json", ",;,", "*/*", "\xff"))
        if pick.random() < 0.2:
            headers["x-idempotency-key"] = pick.choice(("", "a", "\xff" * 100))
        return {
            "method": endpoint.method,
            "url": f"/api/v1/{self._path(endpoint)}{self._query(endpoint)}",
            "content": body,
            "headers": {name: value.encode("latin-1") for name, value in headers.items()},
        }

    def _path(self, endpoint: Endpoint) -> str:
        def part(known: str) -> str:
            return quote(self._random.choice((known, known, known, *self._texts())), safe="/:")

        path = endpoint.path.replace("{checkpoint_id:path}", part("weights/b"))
        path = path.replace("{run_id}", part(self._model)).replace("{sampler_id}", part("s"))
        return path.replace("{session_id}", part(self._session))

    def _query(self, endpoint: Endpoint) -> str:
        if endpoint.method != "GET" or self._random.random() < 0.5:
            return ""
        names = (*endpoint.fields, "file", "signature", "expires", "limit", "offset")
        given = [(self._random.choice(names), quote(self._random.choice(self._texts()))) for _ in range(3)]
        return "?" + "&".join(f"{name}={value}" for name, value in given)

    @staticmethod
    def _texts() -> list[str]:
        return [str(odd) for odd in ODD if "\ud800" not in str(odd) and len(str(odd)) < 6000]

    def _batch(self) -> dict[str, Any]:
        inputs = {"target_tokens": {"data": [8], "dtype": "int64", "shape": [1]}}
        datum = {
            "model_input": {"chunks": [{"tokens": [8], "type": "encoded_text"}]},
            "loss_fn_inputs": inputs,
        }
        return {"data": [datum], "loss_fn": "cross_entropy"}

    def _fields(self, endpoint: Endpoint) -> Any:
        """A request that would do, with some of its values replaced, deep inside or not."""
        pick = self._random
        wanted = {name: self._known[name] for name in endpoint.fields if name in self._known}
        wanted |= {"model_id": self._known["model_id"]} if pick.random() < 0.3 else {}
        made = json.loads(json.dumps(wanted))
        for _ in range(pick.choice((0, 1, 1, 2, 4))):
            made = self._replaced(made)
        return made

    def _replaced(self, value: Any) -> Any:
        pick = self._random
        if isinstance(value, dict) and value and pick.random() < 0.9:
            name = pick.choice(sorted(value))
            if pick.random() < 0.15:
                return {**value, pick.choice(("colour", "", "type", "é")): pick.choice(ODD)}
            return {**value, name: self._replaced(value[name])}
        if isinstance(value, list) and value and pick.random() < 0.7:
            return [self._replaced(value[0]), *value[1:]]
        return pick.choice(ODD)

    def _json(self, endpoint: Endpoint) -> tuple[str, bytes]:
        text = json.dumps(self._fields(endpoint), ensure_ascii=self._random.random() < 0.7)
        return "application/json", text.encode("utf-8", "surrogatepass")

    def _msgpack(self, endpoint: Endpoint) -> tuple[str, bytes]:
        try:
            return "application/msgpack", msgspec.msgpack.encode(self._fields(endpoint))
        except (OverflowError, UnicodeEncodeError):
            return "application/msgpack", encode(OptimStep())

    def _protobuf(self, _: Endpoint) -> tuple[str, bytes]:
        seq = self._random.choice((1, 1, 2, 3, 2**31 - 1))
        return "application/x-protobuf", sdk_body(self._model, seq, [1, 2, 3])

    def _noise(self, _: Endpoint) -> tuple[str, bytes]:
        size = self._random.choice((0, 1, 10, 1000))
        deep = (b"[" * 100_000, b'{"a":' * 50_000, b'"' + b"\\ud800" * 10 + b'"', b"\xef\xbb\xbf{}", b"NaN")
        return "", self._random.choice((self._random.randbytes(size), *deep))

    def _mutated(self, body: bytes) -> bytes:
        out = bytearray(body)
        for _ in range(self._random.choice((1, 1, 3, 10))):
            at = self._random.randrange(len(out) + 1)
            match self._random.randrange(4):
                case 0 if at < len(out):
                    out[at] ^= 1 << self._random.randrange(8)
                case 1:
                    del out[at:]
                case 2:
                    out[at:at] = self._random.randbytes(self._random.randrange(1, 8))
                case _:
                    out[at:at] = out[at : at + 20]
        return bytes(out)


async def test_no_body_gives_5xx(alice: Wire, ingress: Replica, service: Service) -> None:
    session = await alice.session()
    model = (await alice.result(await alice.create_model(session))).json()["model_id"]
    path = await put(service, model, "weights/b", public=True)
    fuzzer = Fuzzer(model, session, str(path))
    requests = [fuzzer.request() for _ in range(BODIES)]
    statuses: dict[int, int] = {}
    broken: list[tuple[int, str]] = []
    transport = httpx.ASGITransport(app=build(ingress.deps), raise_app_exceptions=False)
    began = time.monotonic()

    async def send(http: httpx.AsyncClient, request: dict[str, Any]) -> None:
        answer = await http.request(**request)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        if answer.status_code >= 500 and "healthz" not in request["url"]:
            broken.append((answer.status_code, f"{request} -> {answer.text}"[:2000]))
        if answer.status_code >= 400 and "archive" not in request["url"]:
            assert answer.json().keys() & {"detail", "type"}, request

    async with httpx.AsyncClient(
        transport=transport, base_url="http://fuzz", headers={"x-api-key": "tml-alice"}
    ) as http:
        await each(requests, lambda request: send(http, request))
        still = await http.get("/api/v1/get_server_capabilities")
    assert broken == []
    assert still.status_code == 200
    assert statuses[200] > BODIES / 20, "the fuzzer gets nowhere"
    assert statuses[400] > BODIES / 5
    assert time.monotonic() - began < 120


async def each(requests: list[dict[str, Any]], send: Callable[[dict[str, Any]], Any]) -> None:
    """All of them, so many at a time."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            await send(request)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work())
