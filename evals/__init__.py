"""Evals of attention normalizers: ``python -m evals laws`` and ``python -m evals max-retrieval``.

A task is one module (`max_retrieval`): its settings and presets, its data, its model, ``train`` and
``evaluate``. All else serves every task:

    cells     specs such as a->b(x=1), their checks, the identity of a cell
    study     one run: options, plan, what is missing, results
    jobs      one training with its tests;  pool  the processes that run them
    training  the optimizer and its schedule;  metrics  what is measured on weights
    store     rows.jsonl;  summary, tables, plots, report  what is shown of it
"""
