"""What autograd sees: the tensor that holds K rows, and the code beside autograd's own that meets it."""
