"""Attention without the matrix of its scores."""
