"""Training: the run, its compiled step, and the files that it writes."""
