"""The documented losses again, in numpy: value and derivative of every token, from logprobs alone. Pure.

r = exp(lp − q). Source: Tinker docs, "losses". Nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Array = np.ndarray
Terms = tuple[Array, Array]
"""Per token: the loss's term, and its derivative by the token's logprob. float64."""


def importance_sampling(lp_N: Array, q_N: Array, a_N: Array, config: Mapping[str, float]) -> Terms:
    """−r·A; the derivative is the same, for dr/dlp = r."""
    del config
    term_N = -np.exp(lp_N - q_N) * a_N
    return term_N, term_N


def ppo(lp_N: Array, q_N: Array, a_N: Array, config: Mapping[str, float]) -> Terms:
    """−min(r·A, clamp(r)·A). Where the clamped side is the smaller one, nothing flows."""
    r_N = np.exp(lp_N - q_N)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    clamped_N = np.clip(r_N, low, high)
    flows_N = r_N * a_N <= clamped_N * a_N
    return -np.minimum(r_N * a_N, clamped_N * a_N), np.where(flows_N, -r_N * a_N, 0.0)


def cispo(lp_N: Array, q_N: Array, a_N: Array, config: Mapping[str, float]) -> Terms:
    """−sg(clamp(r))·lp·A: the clamped ratio is a weight, and every token keeps its derivative."""
    clamped_N = np.clip(np.exp(lp_N - q_N), config["clip_low_threshold"], config["clip_high_threshold"])
    return -clamped_N * lp_N * a_N, -clamped_N * a_N


def dro(lp_N: Array, q_N: Array, a_N: Array, config: Mapping[str, float]) -> Terms:
    """−(lp·A − ½·beta·(lp − q)²)."""
    beta, gap_N = config["beta"], lp_N - q_N
    return -(lp_N * a_N - 0.5 * beta * gap_N**2), -(a_N - beta * gap_N)


def gspo(lp_N: Array, q_N: Array, a_N: Array, config: Mapping[str, float]) -> Terms:
    """−min(s·A, clamp(s)·A), s = exp(mean(lp − q)) of the sequence; each token's derivative is by its own logprob."""
    s_N = np.full_like(lp_N, np.exp(np.mean(lp_N - q_N)))
    clamped_N = np.clip(s_N, config["clip_low_threshold"], config["clip_high_threshold"])
    flows_N = s_N * a_N <= clamped_N * a_N
    return -np.minimum(s_N * a_N, clamped_N * a_N), np.where(flows_N, -s_N * a_N, 0.0)


CLOSED_FORMS: dict[str, Callable[[Array, Array, Array, Mapping[str, float]], Terms]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""Of one datum each; `gspo` with a mask of ones."""
