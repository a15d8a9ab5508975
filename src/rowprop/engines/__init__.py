"""The engines: ways to obtain the gradient of the selected rows, and what they cost."""
