"""Adapters to trainers: each in a module of its own, which a user imports by name."""
