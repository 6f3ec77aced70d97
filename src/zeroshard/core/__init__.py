"""Layout, stages, tiers, byte counts and the ledger: arithmetic and data that all packages share."""
