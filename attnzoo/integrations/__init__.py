"""attnzoo inside other libraries: one module per library, imported on demand."""
