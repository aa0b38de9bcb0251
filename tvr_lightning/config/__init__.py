"""Recipe files to validated values."""
