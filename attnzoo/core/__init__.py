"""Calls, variants and their parts: forms, activations, parameters, validation, the registry."""
