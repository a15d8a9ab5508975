"""Stage 3: the gradient of the selected rows."""
