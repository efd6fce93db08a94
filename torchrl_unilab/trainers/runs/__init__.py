"""Whole runs in a directory: train, resume, evaluate, play."""
