"""``python -m rowprop``."""

from rowprop.cli import app

if __name__ == "__main__":
    app(prog_name="rowprop")
