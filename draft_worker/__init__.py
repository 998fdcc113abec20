"""GPU 1: predicts how a verification will end and prepares the next block for every likely ending."""
