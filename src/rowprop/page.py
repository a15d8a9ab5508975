"""What every page shares: its style, the frame of its plots, and the plots as PNG. Figures are plotly's."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tempfile
from base64 import b64decode
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rowprop
from rowprop.lookup import require

Json = dict[str, Any]
GREY = "#858b96"
COLOURS = ("#3b82d6", "#c98a1b", "#1fa07a", "#a463c9", "#c86f6f")
"""Readable on light and dark ground."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
PATIENCE_S = 120
PICTURE_JS = """
// A figure as a picture: on white, with its own legend.
function picture(figure) {
  const layout = {...figure.layout, showlegend: true, legend: {orientation: "h", y: 1.02, yanchor: "bottom"},
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", margin: {l: 16, r: 16, t: 16, b: 16}};
  return Plotly.toImage({data: figure.data, layout}, {format: "png", width: 900, height: 450, scale: 2});
}
"""
AS_TEXT = """
<script>
Promise.all(Object.entries(figures).map(([name, figure]) => picture(figure).then(url => `${name}=${url}`)))
  .then(pictures => { document.body.textContent = pictures.join(" "); });
</script>
"""


def dtypes_of(model: nn.Module) -> str:
    """What the model's parameters are of, such as ``float32`` or ``bfloat16, float32``; torch's default without any."""
    found = {parameter.dtype for parameter in model.parameters()} or {torch.get_default_dtype()}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))


def environment(device: torch.device, dtype: str) -> dict[str, Any]:
    """What a timing depends on beside the settings; ``dtype`` is the model's, see :func:`dtypes_of`."""
    name = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "rowprop": rowprop.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
    }


def style() -> str:
    """The style sheet."""
    return resources.files("rowprop").joinpath("page.css").read_text("utf-8")


def check_extra(purpose: str) -> None:
    """Refuse to start what could not be drawn at its end.

    Raises:
        MissingExtra: plotly or jinja2 is not installed.
    """
    for module, package in (("plotly.offline", "plotly"), ("jinja2", "jinja2")):
        require(module, package, purpose)


def fill(template: str, purpose: str, **content: Any) -> str:
    """Fill in a page's template; text is escaped; ``style``, ``plotly_js`` and ``picture_js`` are there.

    Raises:
        MissingExtra: plotly or jinja2 is not installed.
    """
    jinja2 = require("jinja2", "jinja2", purpose)
    offline = require("plotly.offline", "plotly", purpose)
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(template)
    text: str = page.render(style=style(), plotly_js=offline.get_plotlyjs(), picture_js=PICTURE_JS, **content)
    return text


def frame(x_title: str, y_title: str, *, height: int = 300) -> Json:
    """The frame of a plot, ``height`` pixels high."""
    axis: Json = {"automargin": True, "zeroline": False, "ticks": "", "fixedrange": True, "ticklabelstandoff": 5}
    return {
        "xaxis": axis | {"title": {"text": x_title, "standoff": 10}, "showgrid": False, "rangemode": "tozero"},
        "yaxis": axis | {"title": {"text": y_title, "standoff": 8}, "nticks": 6},
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "height": height,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,  # a finger on the plot scrolls the page
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


def pngs(page: str) -> dict[str, bytes]:
    """Draw a page's figures as PNG, 1800 x 900, with an installed Chromium or Chrome.

    Args:
        page: HTML that defines ``figures``, plotly's figures by name, and holds ``PICTURE_JS``.

    Returns:
        The files' content by name; empty where there is no browser, or it does not draw.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        path = Path(scratch) / "page.html"
        path.write_text(page.replace("</body>", AS_TEXT + "</body>"), "utf-8")
        flags = [*FLAGS, f"--user-data-dir={scratch}/profile", "--virtual-time-budget=20000", "--dump-dom"]
        command = [browser, *flags, path.as_uri()]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired):
            return {}
    drawn = re.findall(r"([\w-]+)=data:image/png;base64,([A-Za-z0-9+/=]+)", done.stdout.partition("<body>")[2])
    return {name: b64decode(content) for name, content in drawn}
