"""Training: losses, optimizers, gathering and sharding over devices, and checkpoints."""
