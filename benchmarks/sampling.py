"""How long 16 sampled tokens take: on an idle service, and while a training queue is pending. The ratio is what
training costs sampling.

    python -m benchmarks.sampling [--calls 40] [--samples 20]

starts a service of its own in a temporary folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import tinker
import torch
from tinker import types

from tests.support import sdk
from tests.support.service import started

PROMPT = types.ModelInput.from_ints(list(b"to be, or not to be, that is the question"))
PARAMS = types.SamplingParams(max_tokens=16, stop=[])


def latencies(client: tinker.SamplingClient, count: int) -> list[float]:
    """Seconds of each of `count` requests, one after the other."""
    found = []
    for _ in range(count):
        begin = time.monotonic()
        client.sample(PROMPT, 1, PARAMS).result(timeout=sdk.WAIT_S)
        found.append(time.monotonic() - begin)
    return found


def measure(folder: Path, calls: int, samples: int) -> None:
    with started(folder) as service:
        sampler = sdk.service_client(service).create_sampling_client(base_model="tiny")
        model = sdk.training_client(service)
        latencies(sampler, 3)
        idle = latencies(sampler, samples)
        targets = torch.arange(500) % 256
        datum = sdk.sdk_datum(targets, {"target_tokens": targets, "weights": torch.ones(500)})
        queue = [model.forward_backward([datum] * 4, "cross_entropy") for _ in range(calls)]
        busy = latencies(sampler, samples)
        pending = sum(not future.future().done() for future in queue)
    for name, found in (("idle", idle), (f"training, {pending} calls left at the end", busy)):
        print(f"{name}: median {statistics.median(found):.3f} s, longest {max(found):.3f} s")
    print(f"ratio of medians {statistics.median(busy) / statistics.median(idle):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=40, help="forward_backward calls in the queue")
    parser.add_argument("--samples", type=int, default=20, help="requests timed in each state")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), chosen.calls, chosen.samples)


if __name__ == "__main__":
    main()
