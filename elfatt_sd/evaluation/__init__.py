"""The evaluation harness: protocols, prompts, images, reference, statistics, measurements and the report."""
