"""Weight versions as a chain of checksummed deltas in an object store."""
