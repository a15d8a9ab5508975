"""Any engine against ``masked``, which is slow and obviously right, on the user's own model and batch."""
