"""Download datasets and convert common dataset layouts: `tvr data download` and `tvr data import`."""
