"""What the tests of pages ask a browser."""

SMALLEST_TEXT = """return Math.min(...[...document.querySelectorAll("main p, main td, main li, main dd")]
  .filter(e => e.textContent.trim()).map(e => parseFloat(getComputedStyle(e).fontSize)))"""
SMALLEST_IN_FIGURES = """return Math.min(...[...document.querySelectorAll("main svg text")].map(e =>
  parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.getBoundingClientRect().width
  / e.ownerSVGElement.viewBox.baseVal.width))"""
"""As high as letters come out on the screen, in pixels."""
