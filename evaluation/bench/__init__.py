"""The serving benchmark: methods and peers, one request at a time, interleaved prompt by prompt in one run."""
