"""What fills a feature store: from a source through the encoders, here or on a cluster, and checked afterwards."""
