"""What the command line takes from the lab."""

from rowprop_lab.folder import to_json
from rowprop_lab.results import show_comparison
from rowprop_lab.run import compare
from rowprop_lab.settings import Settings

__all__ = ["Settings", "compare", "show_comparison", "to_json"]
