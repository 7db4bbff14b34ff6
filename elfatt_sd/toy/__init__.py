"""The embedded pipeline: a small, really trained Stable Diffusion that draws shapes on patterned backgrounds."""
