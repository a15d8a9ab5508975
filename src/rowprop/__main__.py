"""The command ``rowprop``, also as ``python -m rowprop``."""

import sys


def main() -> None:
    """Run the command line, or say which packages it lacks."""
    try:
        from rowprop.app.cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"rowprop: the command line needs {package}, which is not installed; run: pip install typer rich.")
    app(prog_name="rowprop")


if __name__ == "__main__":
    main()
