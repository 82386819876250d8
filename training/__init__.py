"""Trains what the project ships. Not installed."""
