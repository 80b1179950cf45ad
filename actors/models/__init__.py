"""Base models: how a Hugging Face folder of each family becomes a Megatron `GPTModel`."""
