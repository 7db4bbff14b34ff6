"""The paper's tables on vision in miniature: scenes with labels, short trainings, times; see docs/vision.md."""
