"""Search in your own videos: `indexing.index` makes a folder searchable, and `engine.Searcher` answers queries."""
