"""Several loads and dimensions as one run."""
