"""Pages whose tables and plots come from committed results: `python -m tools.pages bench|eval PAGE`."""
