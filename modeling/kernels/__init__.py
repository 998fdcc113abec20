"""Kernels of our own for the CPU, compiled on first use; without a compiler or AVX2 torch's own are used."""
