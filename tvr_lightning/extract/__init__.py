"""Feature extraction into a store, on this machine or on a cluster, with a check of the result."""
