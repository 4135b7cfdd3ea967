"""How a form is computed: one file per backend.

Each has ``unsupported(form, call) -> str | None``, why it cannot run a form for a call, in words,
and ``run(q, k, v, call, form) -> (out, lse)`` with lse None unless the call asks for it.
"""
