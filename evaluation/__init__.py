"""Measurements: acceptance lengths offline, serving benchmarks, peers, reports."""
