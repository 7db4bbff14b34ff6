"""How time and memory are measured, and the machine that they are measured on: one of each."""
