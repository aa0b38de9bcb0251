"""Opening, probing, and decoding of media files, independent of datasets."""
