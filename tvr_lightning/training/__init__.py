"""What a training run is driven by: losses, optimisers, gathering over devices, sharding, reliability."""
