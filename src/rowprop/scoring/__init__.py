"""Stage 1: how much does each row matter."""
