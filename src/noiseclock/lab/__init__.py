"""A laboratory built on the core: known problems, training, comparison."""
