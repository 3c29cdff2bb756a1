"""Flash attention, which never stores the matrix of scores."""
