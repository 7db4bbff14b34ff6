"""The evaluation harness: protocols, prompts, pictures, reference, statistics, measurements and the report."""
