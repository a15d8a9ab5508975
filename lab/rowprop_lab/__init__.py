"""Methods side by side on real data: `rowprop compare`. It runs from a checkout and is in no wheel."""
