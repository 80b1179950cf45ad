"""`tinkerbus gates`: the properties a Tinker-compatible server has to have, measured through the public wire alone.

Everything is asked through the official SDK (a retry through plain HTTP, as the SDK's wire does it), of any URL. The
wire shows neither gradients nor weights, so most gates compare *twins*: models of one seed that got the same calls
but for the one difference in question, and then the logprobs of one probe batch after an optimizer step.
"""
