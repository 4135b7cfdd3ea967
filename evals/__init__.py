"""Evals of attention normalizers: does it hold up as the length grows?

A task is one file in ``tasks``, of one of two families: `retrieval` (one head over a set of items)
and `sequence` (a small transformer over tokens). All else serves every task:

    task      what a task is;  draws  random numbers from (seed, split, length, index) alone
    cells     specs such as a->b(x=1);  study  a task's cells and their keys
    options   what is asked;  run  one run of studies;  costs  what it would take
    jobs      one training with its tests;  pool  who runs them;  progress  how far they are
    training  the optimizer, its schedule, the tests;  metrics, heads  what is measured
    rows      what a row holds;  store  where rows are kept;  summary  estimates over seeds
    tables    with plots and report: what is shown of them
    compare   two results;  readme  the README's tables;  loggers  TensorBoard and wandb
    laws      closed forms;  theory  what they say of trained heads;  ranks  what rank can tell
    sharpness pretrained models
"""
