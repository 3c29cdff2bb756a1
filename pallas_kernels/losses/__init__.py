"""Cross-entropy of logits, and the language-model head fused with it."""
