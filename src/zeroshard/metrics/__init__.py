"""Values of a step: where they come from, and the monitors, sinks and records that they go to."""
