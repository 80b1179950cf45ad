"""What the demo does with a running service, part by part, and how much of it."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path

# The SDK reports its use to whoever it is connected to, which is us.
os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker

from runtime.demo import distribution, over_nats, policy, rot13, sentences, supervised
from runtime.demo.records import ByHand, PolicyRun, PolicyStep, Training
from runtime.demo.screen import Screen
from runtime.demo.server import Endpoints

RANK = 16
SHOWN_WORD = "tinkerbus"
BYTES = 256


class Tour:
    """One SDK session, and an event client beside it. Leave it before the service stops."""

    def __init__(self, server: Endpoints, screen: Screen) -> None:
        self._server = server
        self._screen = screen
        self._sdk = tinker.ServiceClient(base_url=server.http, api_key=server.api_key)

    def leave(self) -> None:
        """End the SDK's session, and its heartbeat with it."""
        self._sdk.close("success").result()

    def supervised(self) -> Training:
        """30 steps on ROT13, and what the model makes of a word it has never seen, before and after."""
        with self._screen.phase("sdk", "(a) The official SDK: 30 supervised steps, two in flight"):
            client = self._client(seed=1)
            shown = rot13.example(SHOWN_WORD)
            untrained = rot13.answers_in(distribution.greedy(client, shown.tokens, BYTES), shown)
            run = supervised.train(
                client,
                rot13.batches(30, 32, seed=1),
                rot13.held_out(),
                learning_rate=3e-3,
                done=self._step_done(of=30, every=10),
            )
            trained = rot13.answers_in(distribution.greedy(client, shown.tokens, BYTES), shown)
        right = "".join(map(rot13.answer, SHOWN_WORD))
        self._screen.line(f"held-out words: {run.before:.3f} → {run.after:.3f} nats per trained token")
        self._screen.line(f"ROT13 of {SHOWN_WORD!r} is {right}: before {untrained}, after {trained}")
        return run

    def policy(self) -> PolicyRun:
        """A few steps of policy gradient, with the gap of each."""
        plan = policy.Plan()
        title = f"(b) The SDK again: {plan.rollouts} × {plan.steps} importance_sampling steps, rewarded for capitals"

        def done(step: PolicyStep) -> None:
            self._screen.line(
                f"rollouts {step.rollouts + 1}: loss {step.loss:+.4f}   gap |d| {step.gap:.4f}   "
                f"k1 {step.k1:+.4f}   k2 {step.k2:.4f}   k3 {step.k3:.4f}"
            )

        with self._screen.phase("rl", title):
            prompts = [word.encode() for word in rot13.TRAINING_WORDS if len(word) == 5][:16]
            run = policy.train(self._client(seed=2), prompts, plan, done)
        self._screen.line(f"probability of a capital: {run.before:.3f} → {run.after:.3f}")
        return run

    def events(self) -> tuple[Training, ByHand]:
        """The same task without the SDK, and one operation without our library."""
        with self._screen.phase(
            "nats", "(c) NATS: 15 supervised steps by bus.client, then one operation as JSON"
        ):
            run, by_hand = asyncio.run(
                over_nats.train(
                    self._server,
                    f"demo-{secrets.token_hex(4)}",
                    rot13.batches(15, 16, seed=3),
                    rot13.held_out(),
                    learning_rate=6e-3,
                    rank=RANK,
                    done=self._step_done(of=15, every=5),
                )
            )
        self._screen.line(f"held-out words: {run.before:.3f} → {run.after:.3f} nats per trained token")
        self._screen.line(f"JSON on {by_hand.subject}")
        self._screen.line(f"answered as {by_hand.content_type}: {by_hand.loss:.3f} nats per trained token")
        return run, by_hand

    def sentences(self, model_folder: Path) -> Training:
        """A pretrained model on a handful of sentences."""
        steps = 8
        title = f"(a) The official SDK: {steps} supervised steps on {len(sentences.TRAINING)} real sentences"
        with self._screen.phase("sdk", title):
            batch = sentences.examples(sentences.TRAINING, model_folder)
            run = supervised.train(
                self._client(seed=1),
                [batch] * steps,
                sentences.examples(sentences.HELD_OUT, model_folder),
                learning_rate=1e-3,
                done=self._step_done(of=steps, every=1),
            )
        self._screen.line(
            f"perplexity of held-out sentences: {math.exp(run.before):.1f} → {math.exp(run.after):.1f}"
        )
        return run

    def _client(self, *, seed: int) -> tinker.TrainingClient:
        return self._sdk.create_lora_training_client(
            base_model=self._server.base_model, rank=RANK, seed=seed
        ).result()

    def _step_done(self, *, of: int, every: int) -> Callable[[int, float], None]:
        def done(steps: int, loss: float) -> None:
            self._screen.working(f"step {steps} of {of}, loss {loss:.3f}", minor=steps % every != 0)

        return done
