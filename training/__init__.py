"""Training of the drafting networks for a target: corpus, draft model, adapter, calibration."""
