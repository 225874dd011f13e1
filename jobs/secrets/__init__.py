"""Search for secrets in texts and values, which replaces them by `***`. Use masking.py."""
