"""Features kept on disk: shards, the store that reads them, the writer; knows no dataset and no encoder."""
