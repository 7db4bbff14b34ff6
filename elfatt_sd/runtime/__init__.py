"""What happens in a patched run."""
