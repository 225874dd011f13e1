"""HTTP API, one file per resource."""
