"""Training state outside the device: where it rests, and how it moves there and back."""
