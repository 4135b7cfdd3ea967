"""Measurements on attention weights and heads."""
