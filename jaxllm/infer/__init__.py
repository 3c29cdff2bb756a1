"""Generates text with a trained model, and evaluates the model."""
