"""What is kept of a gradient: where its rows lie in a shape, which rows these are, and their values."""
