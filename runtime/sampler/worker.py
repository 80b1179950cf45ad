"""The one thread that drives an engine; the event loop beside it stays free."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Generic

from runtime.sampler.contract import Engine, Finished, SampleRequest, SamplingRefused, W

Finish = Callable[[list[Finished]], None]


class Worker(Generic[W]):
    """Start it in the event loop that is to hear of what is finished."""

    def __init__(self, engine: Engine[W], finish: Finish, *, threads: int) -> None:
        self.engine = engine
        self._finish = finish
        self._threads = threads
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread has ended; with its error, where it ended by one."""
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def add(self, request: SampleRequest, weights: W, refuse: Callable[[SamplingRefused], None]) -> None:
        """`refuse` is called in the event loop where the engine does not take it."""

        def order() -> None:
            try:
                self.engine.add(request, weights)
            except SamplingRefused as refused:
                self._loop.call_soon_threadsafe(refuse, refused)

        self._orders.put(order)

    def cancel(self, request_id: str) -> None:
        self._orders.put(lambda: self.engine.cancel(request_id))

    def stop(self) -> None:
        self._orders.put(None)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as raised:
            error = raised
        try:
            self._loop.call_soon_threadsafe(self._end, error)
        except RuntimeError:
            return  # the loop is closed: nobody listens any more

    def _work(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        while True:
            while self.engine.idle or not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    return
                order()
            if finished := self.engine.step():
                self._loop.call_soon_threadsafe(self._finish, finished)

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
