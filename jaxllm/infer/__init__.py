"""Text from a trained model, and how good it is."""
