"""Training state in host memory or on disk: the plan, the stores, and the copies."""
