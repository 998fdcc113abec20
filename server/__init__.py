"""The HTTP process: request surface, tokenising, streaming, metrics and supervision of the two workers."""
