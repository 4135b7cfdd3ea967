"""What a call and a variant are: forms, calls, parameters, the registry, activations."""
