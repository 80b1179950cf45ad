"""A TCP proxy before the broker: it can swallow the broker's answers, and cut every connection."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    def __init__(self, broker_url: str) -> None:
        host, _, port = broker_url.removeprefix("nats://").partition(":")
        self._target = (host, int(port))
        self._writers: list[asyncio.StreamWriter] = []
        self.muted = False
        """While true, what clients say arrives and what the broker says does not."""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection; new ones are taken."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers += [writer, far_writer]
        await asyncio.gather(
            self._pump(reader, far_writer, down=False), self._pump(far_reader, writer, down=True)
        )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while data := await reader.read(1 << 16):
                if not (down and self.muted):
                    writer.write(data)
                    await writer.drain()
            writer.close()
