"""Adapters to trainers, each in a separate module that a user imports by name."""
