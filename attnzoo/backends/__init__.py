"""How a form is computed: one file or folder per backend, listed in ``selection``."""
