"""Any engine against the slow one that is obviously right, on the user's own model and batch."""
