"""Softmax over the rows of a matrix, by three algorithms: for comparison, without a public entry.

`torch.softmax` computes the same function, and attention and losses use neither: their kernels
never store a row of weights. The kernels are here, beside those they share helpers with, so that
``python -m benchmarks rows --device cuda`` can compare the algorithms on a GPU. Tests run them in
the interpreter, and ``python -m benchmarks compile`` compiles them.
"""
