"""`tinkerbus bench`: what the service costs over a bare Megatron loop, all measured in one run."""
