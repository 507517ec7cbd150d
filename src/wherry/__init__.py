"""Takes a large language model through an HPC site: prepare, train, merge, serve, eval."""

__version__ = "0.1.0"
