"""The mathematics of speculation as pure functions.

Sampling, acceptance, outcome scores, calibration, selection and pass plans. Knows nothing of
models, sequences, sockets or files.
"""
