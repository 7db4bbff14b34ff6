"""The recipe of the embedded diffusion transformer; only maintainers use it."""
