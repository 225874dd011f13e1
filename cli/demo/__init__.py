"""The command `demo`: the whole service on real data. tasks.py is what a user would write."""
