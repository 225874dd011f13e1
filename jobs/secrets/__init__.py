"""Finds secrets in texts and values, and puts `***` in their place (Q16). masking.py is the way in."""
