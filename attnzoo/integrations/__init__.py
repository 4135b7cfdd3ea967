"""attnzoo inside other libraries: a module for each, loaded by those who use it."""
