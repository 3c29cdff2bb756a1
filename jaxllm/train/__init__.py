"""Training: the run, its compiled step, and what it leaves on the disk."""
