"""Benchmarks: figures side by side in one run; they never gate anything."""
