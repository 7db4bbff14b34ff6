"""Draw images with a patched pipeline, and compare them."""
