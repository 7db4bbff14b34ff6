"""A patched run: where each call is, what its layers do, and what is kept from step to step."""
