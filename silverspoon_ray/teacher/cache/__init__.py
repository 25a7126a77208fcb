"""The teacher's answers on disk, one entry for each sample: read first, written through."""
