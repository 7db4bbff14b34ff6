"""The embedded pipeline: a small, really trained Stable Diffusion that draws shapes on patterned backgrounds."""

STEPS = 25
GUIDANCE = 3.0  # the guidance scale at which the pictures are best
