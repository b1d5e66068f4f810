"""Measurements that users run: `ds4v41 bench ...`."""
