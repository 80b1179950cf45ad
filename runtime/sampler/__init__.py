"""Sampling: continuous batching with a KV cache, over frozen weights, in processes of its own.

`contract.py` and what asks for samples import neither torch nor transformers; the engine does, in the sampler process
alone, at its first request.
"""
