"""``python -m rowprop``."""

from rowprop.app.cli import app

if __name__ == "__main__":
    app(prog_name="rowprop")
