"""Image corpora: sources, checks for broken files, and worker processes."""
