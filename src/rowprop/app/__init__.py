"""The command line, and all that only the command line needs."""
