"""Benchmarks: tokens per second against the hardware's limit, and against what a user would run instead."""
