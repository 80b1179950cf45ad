"""The weights in memory: the base model, and the samplers used last. What was saved is what is served, unchanged.

A folder is read once and then frozen, whatever happens to it afterwards. What running sequences use stays with them.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from runtime.sampler import adapter as adapters
from runtime.sampler import experts, network
from runtime.sampler.adapter import Adapter
from runtime.sampler.contract import SamplingRefused
from runtime.sampler.network import Network


@dataclass(frozen=True, eq=False)
class Served:
    """Weights to sample from."""

    network: Network
    adapter: Adapter | None = None


class Library:
    """Safe to use from several threads: one folder is read at a time."""

    def __init__(self, base: Path, max_samplers: int) -> None:
        self._folder = base
        self._max_samplers = max_samplers
        self._base: Network | None = None
        self._samplers: OrderedDict[str, Served] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self.eos_ids = network.eos_ids(base)

    def get(self, url: str | None) -> Served:
        """The weights in a folder, by its URL; the base model's for None. Raises SamplingRefused."""
        with self._lock:
            if self._base is None:
                self._base = network.load(self._folder)
            if url is None:
                return Served(self._base)
            served = self._samplers.pop(url, None) or self._read(url, self._base)
            self._samplers[url] = served
            while len(self._samplers) > self._max_samplers:
                self._samplers.popitem(last=False)
            return served

    @property
    def held(self) -> tuple[str, ...]:
        """URLs of the samplers in memory, the one used longest ago first."""
        return tuple(self._samplers)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._words().decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def check_decodes(self) -> None:
        """Raises SamplingRefused where the base model has no tokenizer."""
        try:
            self._words()
        except (OSError, ValueError, ImportError) as error:
            raise SamplingRefused(
                f"sampling_params.stop holds a text, but the base model's folder has no tokenizer: {error}"
            ) from error

    def _words(self) -> Any:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
        return self._tokenizer

    def _read(self, url: str, base: Network) -> Served:
        with tempfile.TemporaryDirectory(prefix="tinkerbus-sampler-") as scratch:
            folder = _local(url, Path(scratch))
            if not adapters.is_adapter(folder):
                return Served(network.load(folder))
            adapter = adapters.read(folder)
        if base.router.has(adapter):
            base.router.check(adapter)
            return Served(base, adapter)
        return Served(Network(experts.folded(base.model, adapter), base.context))


def _local(url: str, scratch: Path) -> Path:
    """The folder itself where it is on this machine, else a copy. Raises SamplingRefused."""
    try:
        filesystem, path = fsspec.url_to_fs(url)
        if not filesystem.exists(path):
            raise SamplingRefused(f"the weights at {url} are gone", "server")
        if "file" in filesystem.protocol:
            return Path(path)
        filesystem.get(path.rstrip("/") + "/", f"{scratch}/weights/", recursive=True)
    except (OSError, ValueError, ImportError) as error:
        raise SamplingRefused(f"the weights at {url} cannot be read: {error}", "server") from error
    return scratch / "weights"
