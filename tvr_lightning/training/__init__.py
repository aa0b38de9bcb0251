"""Training: losses, optimizers, gathering and sharding over devices, checkpoints, and run folders."""
