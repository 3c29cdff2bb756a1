"""Cross-entropy of logits, and of the head and the loss in one."""
