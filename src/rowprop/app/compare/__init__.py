"""Methods side by side on real data: `rowprop compare`. Outermost: nothing in the library imports it."""
