"""Runs of several loads and dimensions."""
