"""The Megatron-core actor group: one frozen base model, many adapters, one gradient window each."""

import warnings

# Megatron-core says at import that Apex and Transformer Engine are absent; the local layer spec needs neither.
warnings.filterwarnings("ignore", module=r"megatron\.core")
