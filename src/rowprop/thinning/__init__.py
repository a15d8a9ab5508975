"""Thinning: rows leave the gradient at random on its way back, and it stays the full gradient in expectation."""
