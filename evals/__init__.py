"""Evals of attention normalizers: does it hold up as the length grows?

A room imports those above it, and none below:

    task        what a task is: settings, presets, data, a model, what is measured
    measures    what is measured on attention, and what a machine does to it
    tasks       one file a task: its data (drawn by draws), presets, and family
    results     what a row holds, where rows are kept, estimates over seeds
    harness     options, the study of a task, its runs, who runs them, training, costs
    theory      closed forms, laws fitted to trained heads, ranks
    reporting   tables, pictures, the page (its markup, style and script in template), commands
    pretrained  how sharp pretrained models attend
"""
