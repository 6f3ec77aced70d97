"""Where optimizer state, parameters and gradients rest outside the device, and how they get there and back."""
