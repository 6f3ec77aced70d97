"""Makes one HTML page of the records in a run's folder. Imports neither torch nor the engine."""
